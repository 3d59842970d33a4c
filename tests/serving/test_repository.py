"""Which models a path names: files, folders, repositories; versions and names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batcher.errors import ConfigError
from batcher.serving.repository import ModelSource, check_name, find_models, is_version


def file(path: Path) -> Path:
    """An empty file, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def refusal(*paths: Path) -> str:
    """The text with which paths are refused."""

    def look() -> None:
        for source in find_models(paths):
            check_name(source)

    with pytest.raises(ConfigError) as caught:
        look()
    return str(caught.value)


# -- where models are -----------------------------------------------------------------


def test_a_file_is_a_model_of_its_stem(tmp_path: Path) -> None:
    """An .onnx file is served under its name without the ending, as version 1."""
    path = file(tmp_path / "resnet50.v2.onnx")

    assert find_models([path]) == [ModelSource("resnet50.v2", "1", path, None)]


def test_a_folder_is_a_model_with_its_versions(tmp_path: Path) -> None:
    """Of several versions the highest number is served, not the last by letters."""
    for version in ("1", "9", "10"):
        file(tmp_path / "m" / version / "model.onnx")
    config = file(tmp_path / "m" / "model.toml")

    assert find_models([tmp_path / "m"]) == [
        ModelSource("m", "10", tmp_path / "m" / "10" / "model.onnx", config)
    ]


def test_a_repository_is_a_folder_of_models(tmp_path: Path) -> None:
    """Every folder in it that holds a model is one, in the order of names."""
    for name in ("b", "a", "c"):
        file(tmp_path / name / "1" / "model.onnx")
    fake = file(tmp_path / "fake" / "model.toml")

    found = find_models([tmp_path])

    assert [source.name for source in found] == ["a", "b", "c", "fake"]
    assert found[3] == ModelSource("fake", "1", None, fake)


@pytest.mark.parametrize(
    "other",
    [
        "0/model.onnx",
        "01/model.onnx",
        "-1/model.onnx",
        "latest/model.onnx",
        "²/model.onnx",
        "99999999999999999999/model.onnx",
        "2/model.engine",
        "2/other.onnx",
        "model.onnx",
    ],
)
def test_what_is_no_version_is_passed_over(tmp_path: Path, other: str) -> None:
    """Only folders named by a positive number and holding a model are versions."""
    file(tmp_path / "m" / other)
    file(tmp_path / "m" / "1" / "model.onnx")

    assert [source.version for source in find_models([tmp_path])] == ["1"]


def test_hidden_folders_are_passed_over(tmp_path: Path) -> None:
    """What begins with a dot (such as a mount's own folders) is no model."""
    file(tmp_path / "..data" / "1" / "model.onnx")
    file(tmp_path / "m" / "1" / "model.onnx")

    assert [source.name for source in find_models([tmp_path])] == ["m"]


def test_a_link_has_its_own_name(tmp_path: Path) -> None:
    """A model's folder that is a link is called as the link, not as its target."""
    file(tmp_path / "store" / "9f3c" / "1" / "model.onnx")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "resnet").symlink_to(tmp_path / "store" / "9f3c")

    assert [source.name for source in find_models([repository])] == ["resnet"]
    assert [source.name for source in find_models([repository / "resnet"])] == [
        "resnet"
    ]


def test_the_current_folder_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model served as `.` is called as its folder is."""
    file(tmp_path / "m" / "1" / "model.onnx")
    monkeypatch.chdir(tmp_path / "m")

    assert [source.name for source in find_models([Path()])] == ["m"]
    assert [source.name for source in find_models([Path("1/..")])] == ["m"]


def test_a_path_may_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tilde in a path is the home folder."""
    file(tmp_path / "m.onnx")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert [source.path for source in find_models([Path("~/m.onnx")])] == [
        tmp_path / "m.onnx"
    ]


def test_several_paths_are_served_together(tmp_path: Path) -> None:
    """Files and folders may be mixed; they are served in the order given."""
    paths = [file(tmp_path / "z.onnx"), file(tmp_path / "a" / "1" / "model.onnx")]

    found = find_models([paths[0], tmp_path / "a"])

    assert [source.name for source in found] == ["z", "a"]


# -- what is refused ------------------------------------------------------------------


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing path is said to be missing."""
    path = tmp_path / "none"

    assert refusal(path) == f"{path}: no such file or folder"


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    """A file that is neither ONNX nor a plan is refused."""
    path = file(tmp_path / "model.engine")

    text = f"{path}: not an .onnx or .plan file, nor a folder of models"
    assert refusal(path) == text


def test_a_plan_alone_is_a_model(tmp_path: Path) -> None:
    """A .plan file is served under its stem."""
    path = file(tmp_path / "bert.plan")

    assert find_models([path]) == [ModelSource("bert", "1", None, None, path)]


def test_a_version_may_hold_a_plan_and_its_onnx(tmp_path: Path) -> None:
    """Both are found; which is used is for the engine to say."""
    onnx = file(tmp_path / "m" / "1" / "model.onnx")
    plan = file(tmp_path / "m" / "1" / "model.plan")
    only = file(tmp_path / "p" / "3" / "model.plan")

    assert find_models([tmp_path]) == [
        ModelSource("m", "1", onnx, None, plan),
        ModelSource("p", "3", None, None, only),
    ]


def test_an_empty_repository_says_what_is_expected(tmp_path: Path) -> None:
    """A folder without models is refused with how one looks."""
    file(tmp_path / "m" / "model.onnx")

    text = refusal(tmp_path)

    assert text.startswith(f"{tmp_path}: no models")
    assert "<model>/<version>/model.onnx" in text
    assert "<model>/model.toml" in text


def test_two_models_of_one_name_are_refused_with_both_paths(tmp_path: Path) -> None:
    """Callers could not tell two models of one name apart."""
    one = file(tmp_path / "m.onnx")
    two = file(tmp_path / "m" / "1" / "model.onnx")

    text = refusal(one, tmp_path / "m")

    assert text == f"two models are called 'm': {one} and {two}"


def test_two_fake_models_of_one_name_are_refused_with_their_files(
    tmp_path: Path,
) -> None:
    """A model without a model file is named by its configuration."""
    files = [file(tmp_path / side / "m" / "model.toml") for side in "ab"]

    text = refusal(tmp_path / "a", tmp_path / "b")

    assert text == f"two models are called 'm': {files[0]} and {files[1]}"


@pytest.mark.parametrize(
    "name", ["a b", "modèle", "m:0", "a-b_c.d", "1", "m" * 128, "モデル", "%s", "m}"]
)
def test_unusual_names_are_taken(tmp_path: Path, name: str) -> None:
    """Spaces, punctuation and other scripts are shown everywhere as they are."""
    model = tmp_path / name / "1" / "model.onnx"
    if len(name.encode()) < 256:
        file(model)

    assert [source.name for source in find_models([tmp_path])] == [name]


@pytest.mark.parametrize(
    "name", ['a"b', "a'b", "a\\b", "a\nb", "a\tb", "a\x7fb", "a\u2028b", "a\u202eb"]
)
def test_names_that_cannot_be_shown_are_refused(tmp_path: Path, name: str) -> None:
    """Quotes, backslashes and control characters would break texts and commands."""
    file(tmp_path / name / "1" / "model.onnx")

    assert f"{name!r} cannot be a model's name" in refusal(tmp_path)


@pytest.mark.skipif(sys.platform == "darwin", reason="there is no such file name")
def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A file name that is no UTF-8 cannot travel over the protocol."""
    file(Path(f"{tmp_path}/a\udcff/1/model.onnx"))

    assert "cannot be a model's name" in refusal(tmp_path)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The limit is named."""
    file(tmp_path / ("m" * 129) / "1" / "model.onnx")

    assert "a model's name has at most 128 characters" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", True),
        ("10", True),
        ("9" * 18, True),
        ("9" * 19, False),
        ("", False),
        ("0", False),
        ("01", False),
        ("-1", False),
        ("1.0", False),
        ("abc", False),
        (" 1", False),
        ("²", False),
        ("\u0661", False),
    ],
)
def test_versions_are_positive_numbers(text: str, expected: bool) -> None:
    """A version is a positive decimal number as Triton writes it."""
    assert is_version(text) is expected
