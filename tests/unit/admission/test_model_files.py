"""What a model's config.json may have wrong, in the target and in the draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configurations import Build

from dyntree_plugin.admission.reasons import MISTAKES, of

pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize("which", ["model", "speculative_config.model"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[]", "cannot be read: its config.json must be a JSON object"),
        (b"null", "cannot be read: its config.json must be a JSON object"),
        (b"{", "cannot be read: its config.json is not JSON: Expecting"),
        (b"\xff\xfe\x00", "cannot be read: its config.json is not JSON"),
        (b"[" * 100_000, "cannot be read: its config.json is nested too deeply"),
        ({"hidden_size": "abc"}, "Field 'hidden_size' expected int, got str (value: 'abc')"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"quantization_config": 5}, "AttributeError: 'int' object has no attribute 'to_dict'"),
        ({"layer_types": 5}, "TypeError: 'int' object is not iterable"),
        ({"num_key_value_heads": 0}, "sizes={'kv_heads': 0} is not supported"),
        ({"vocab_size": -3}, "sizes={'vocab_size': -3} is not supported: they must be above 0"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_configuration_of_a_model_is_named_with_its_folder(
    build: Build,
    model_folder: Callable[..., str],
    which: str,
    content: bytes | dict[str, Any],
    told: str,
) -> None:
    changes = content if isinstance(content, dict) else {}
    folder = model_folder(**changes)
    if isinstance(content, bytes):
        (Path(folder) / "config.json").write_bytes(content)
    wrong = {"model": folder}
    arguments = wrong if which == "model" else {"speculative": wrong}
    with pytest.raises(MISTAKES) as error:
        build(**arguments)
    (reason, *_) = of(error.value)
    assert told in reason
    named = {"model": "target model: "}.get(which, "draft model") if "sizes" in told else folder
    assert str(named) in reason


def test_other_errors_of_vllm_are_left_alone(build: Build) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        build(max_model_len=100_000)


def test_errors_from_elsewhere_than_a_models_files_are_left_alone(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def fail(_: EngineArgs) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(EngineArgs, "create_model_config", fail)
    with pytest.raises(RuntimeError, match=r"^no such device$"):
        build()


def test_a_further_draft_is_named_with_its_option(
    build: Build, model_folder: Callable[..., str]
) -> None:
    folder = model_folder()
    (Path(folder) / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object") as error:
        build({"drafts": [folder]})
    assert of(error.value)[0].startswith(f"dyntree.drafts={folder!r} cannot be read")
