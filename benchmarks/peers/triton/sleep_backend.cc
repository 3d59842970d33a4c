// Peer: a backend for Triton that sleeps BENCH_BASE_MS + rows x BENCH_PER_ROW_US a batch
// and echoes INPUT0 as OUTPUT0. It measures Triton's own core: front end, batcher, reply.
//
// The few functions of Triton's backend API that it needs are declared here, as in
// include/triton/core/tritonbackend.h of triton-inference-server/core at r24.10 (the
// release that nvidia-pytriton ships), so that it builds without that repository.

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cstdint>

extern "C" {
struct TRITONSERVER_Error;
struct TRITONBACKEND_Backend;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_ModelInstance;
struct TRITONBACKEND_Output;
struct TRITONBACKEND_Request;
struct TRITONBACKEND_Response;

typedef unsigned int TRITONSERVER_DataType;    // an enum in C; only passed through
typedef unsigned int TRITONSERVER_MemoryType;  // an enum in C
constexpr TRITONSERVER_MemoryType TRITONSERVER_MEMORY_CPU = 0;
constexpr uint32_t TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1;
constexpr uint32_t TRITONSERVER_REQUEST_RELEASE_ALL = 1;

TRITONSERVER_Error* TRITONBACKEND_RequestInput(
    TRITONBACKEND_Request*, const char* name, TRITONBACKEND_Input**);
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request*, uint32_t);
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input*, const char** name, TRITONSERVER_DataType*,
    const int64_t** shape, uint32_t* dims, uint64_t* bytes, uint32_t* buffers);
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input*, uint32_t index, const void** buffer, uint64_t* bytes,
    TRITONSERVER_MemoryType*, int64_t* memory_id);
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(
    TRITONBACKEND_Response**, TRITONBACKEND_Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response*, TRITONBACKEND_Output**, const char* name,
    TRITONSERVER_DataType, const int64_t* shape, uint32_t dims);
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output*, void** buffer, uint64_t bytes, TRITONSERVER_MemoryType*,
    int64_t* memory_id);
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(
    TRITONBACKEND_Response*, uint32_t flags, TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*, bool success,
    uint64_t start_ns, uint64_t compute_start_ns, uint64_t compute_end_ns,
    uint64_t end_ns);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance*, uint64_t rows, uint64_t start_ns,
    uint64_t compute_start_ns, uint64_t compute_end_ns, uint64_t end_ns);
}

namespace {

double base_s = 2e-3;
double per_row_s = 20e-6;

double FromEnvironment(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text ? atof(text) : otherwise;
}

uint64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

void Sleep(double seconds) {
  if (seconds <= 0) return;
  timespec length;
  length.tv_sec = static_cast<time_t>(seconds);
  length.tv_nsec = static_cast<long>((seconds - length.tv_sec) * 1e9);
  nanosleep(&length, nullptr);
}

void Echo(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Input* input;
  TRITONBACKEND_Output* output;
  TRITONSERVER_DataType datatype;
  TRITONSERVER_MemoryType in_memory = TRITONSERVER_MEMORY_CPU;
  TRITONSERVER_MemoryType out_memory = TRITONSERVER_MEMORY_CPU;
  const int64_t* shape;
  const void* from;
  void* to;
  uint64_t bytes, in_buffer;
  uint32_t dims, buffers;
  int64_t in_id = 0, out_id = 0;
  TRITONBACKEND_ResponseNew(&response, request);
  TRITONBACKEND_RequestInput(request, "INPUT0", &input);
  TRITONBACKEND_InputProperties(
      input, nullptr, &datatype, &shape, &dims, &bytes, &buffers);
  TRITONBACKEND_InputBuffer(input, 0, &from, &in_buffer, &in_memory, &in_id);
  TRITONBACKEND_ResponseOutput(response, &output, "OUTPUT0", datatype, shape, dims);
  TRITONBACKEND_OutputBuffer(output, &to, bytes, &out_memory, &out_id);
  memcpy(to, from, bytes);
  TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, nullptr);
}

}  // namespace

extern "C" TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*) {
  base_s = FromEnvironment("BENCH_BASE_MS", 2) / 1e3;
  per_row_s = FromEnvironment("BENCH_PER_ROW_US", 20) / 1e6;
  return nullptr;
}

// Every request of the benchmark has one row.
extern "C" TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests,
    const uint32_t count) {
  const uint64_t start = NowNs();
  Sleep(base_s + per_row_s * count);
  const uint64_t end = NowNs();
  for (uint32_t i = 0; i < count; i++) {
    Echo(requests[i]);
    TRITONBACKEND_ModelInstanceReportStatistics(
        instance, requests[i], true, start, start, end, end);
    TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL);
  }
  TRITONBACKEND_ModelInstanceReportBatchStatistics(
      instance, count, start, start, end, end);
  return nullptr;
}
