"""Every kind of draft that the tests of engines serve is admitted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import blocks
import heads
import latent_targets
import masked_drafts
import pytest
import step_targets
from configurations import Build
from random_targets import MODULES, gemma4_assistant, random_target

from dyntree_plugin import pair

Write = Callable[[Path], Path]
IN_PARALLEL = {"parallel_drafting": True}

OF_PAIR: dict[str, tuple[str, Write, dict[str, Any]]] = {
    "random head": ("eagle3", heads.random_head, {}),
    "mirror": ("eagle3", heads.mirror_head, {}),
    "EAGLE's first mirror": ("eagle", heads.first_eagle_mirror, {}),
    "P-EAGLE": ("eagle3", masked_drafts.peagle, IN_PARALLEL),
    "PARD": ("draft_model", masked_drafts.pard, IN_PARALLEL),
    "the embedded draft": ("draft_model", lambda _: pair.paths()["draft"], {}),
    "the embedded block draft": ("dflash", lambda _: pair.paths()["dflash"], {}),
    **{
        kind: ("dflash", partial(blocks.random_block, kind=kind), {})
        for kind in blocks.KINDS
        if kind != "DSpark"
    },
    "DSpark": ("dspark", partial(blocks.random_block, kind="DSpark"), {}),
    **{
        f"trained {kind}": ("dflash", partial(blocks.trained_block, kind=kind), {})
        for kind in ("DFlash2", "Muse-Glimmer")
    },
}  # fmt: skip
"""By kind: the method of a draft of the embedded target, what writes it, and further options."""


def admitted(build: Build, target: Path, method: str, draft: Path | None, **more: Any) -> None:
    speculation = {"method": method, "num_speculative_tokens": 4} | more
    if draft is not None:
        speculation["model"] = str(draft)
    config = build(model=str(target), speculative_config=speculation, max_model_len=256)
    assert config.speculative_config is not None
    assert config.speculative_config.method == method


@pytest.mark.parametrize("kind", OF_PAIR)
def test_drafts_of_the_embedded_target_are_admitted(
    build: Build, tmp_path: Path, kind: str
) -> None:
    method, write, more = OF_PAIR[kind]
    # vLLM takes a method from the path, which here has the name of the test.
    admitted(build, pair.paths()["target"], method, write(tmp_path / "folder"), **more)


@pytest.mark.parametrize("kind", ["MiMo", "deepseek_v3", "step3p5", *MODULES])
def test_modules_of_targets_are_admitted(build: Build, tmp_path: Path, kind: str) -> None:
    write: dict[str, Write] = {
        "MiMo": heads.mtp_mirror,
        "step3p5": step_targets.step_target,
        "deepseek_v3": partial(latent_targets.latent_target, kind="deepseek_v3"),
    }
    target = write.get(kind, partial(random_target, kind=kind))(tmp_path / "folder")
    # vLLM takes a multiple of the number of modules, of which Step-3.5 has three.
    admitted(build, target, "mtp", None, num_speculative_tokens=6)


def test_gemma4s_assistant_is_admitted(build: Build, tmp_path: Path) -> None:
    target = random_target(tmp_path / "target", "gemma4_text")
    admitted(build, target, "mtp", gemma4_assistant(tmp_path / "module"))


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_head_with_latent_attention_is_admitted(
    build: Build, tmp_path: Path, method: str
) -> None:
    target = latent_targets.latent_target(tmp_path / "target", "deepseek_v2")
    admitted(build, target, method, latent_targets.latent_head(tmp_path / "head", target, method))
