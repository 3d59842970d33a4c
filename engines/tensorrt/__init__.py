"""The TensorRT back end: engines built from ONNX, kept in a cache, run on a GPU.

Nothing here imports TensorRT or CUDA before it is needed, and nothing is imported into
this file: `engines.tensorrt.cache` works on a machine that has neither.
"""
