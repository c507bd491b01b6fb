"""Compile Triton's kernels for a GPU that need not be there, and read the machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
HAS_TOOLS = all((TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump"))
NO_TOOLS = "this build of Triton has no ptxas and cuobjdump"

TYPES = {
    "*bf16": "Q KV CACHE OUT LOGITS X STEP B C K V GATE BETA RAW KEPT HISTORY WEIGHT SINKS",
    "*fp32": (
        "PARTIAL PARTIAL_M PARTIAL_L MAXIMA TEMPERATURES SCORES SUMS EVIDENCE EDGES TRIE_EVIDENCE "
        "VALUES OPEN FEATURES BASES WEIGHTS STORED_VALUES STORED_FEATURES INFORMATION PRIOR LOW "
        "HIGH PROCESSED REPETITION FREQUENCY PRESENCE CHANCES CHANGES REST SHIFTS TOPS STATES A "
        "SKIP BIAS LOGS QUERY_SCALE KEY_SCALE VALUE_SCALE LSE"
    ),
    "*i32": (
        "TABLE CTX INDPTR BITS TEXTS LENGTHS KEYS ABOVE EXPANSIONS GRAFT_DEPTHS LOGITS_BOUNDS "
        "ROWS_BOUNDS ANCESTORS SEQ_LENS PREFILL_LENS CTX_LENS IDS ROW_BITS EMITTED REJECTED "
        "SIZES LOCAL PATHS PROMPT_MASK OUTPUT_COUNTS WORD_TOKENS OFFSETS WORD_COUNTS "
        "PROMPT_LENS TOTAL_LENS BUDGETS LAST_STARTS LAST_ENDS START_MARKER END_MARKER FORCED "
        "VERIFIED LAST_NODE OFFERED OFFERED_LAST STARTS SELECTED"
    ),
    "*i64": (
        "LAYERS TOKENS PARENTS SAMPLED PATH SEEDS POSITIONS REQUESTS ROW_POSITIONS STORED "
        "ROW_ABOVE SLOTS DEPTHS FORWARDS ADDRESSES TRIE_TOKENS TRIE_ABOVE BEST CLASSES NODES "
        "LEVELS USEFUL ROOTS SCRATCH BECAME COUNTS ADMITTED GROWN STORED_AT OUT_TOKENS STRIDES "
        "LAST ENDS END_SLOTS ORIGINS"
    ),
    "*i1": "EXISTS TRIE_EXISTS CHAINED CHAINED_AT FORBIDDEN MAPPED",
    "*fp64": "REPORT",
    "*u64": "TABLES",
    "*i8": "KINDS STORED_KINDS",
    "fp32": "least strength memory scale",
}
"""Arguments of kernels by type."""
POINTERS = {name: of for of, names in TYPES.items() for name in names.split()}
UNQUANTISED = dict.fromkeys(("QUERY_SCALE", "KEY_SCALE", "VALUE_SCALE"))
PLAIN: dict[str, Any] = {"SINKS": None, "WINDOW": 0, "CAP": 0.0}
"""Attention without features."""
WHOLE = PLAIN | {"LSE": None}
"""Tree attention without features that reads the context, too."""
CAPABILITIES = pytest.mark.parametrize(
    "capability", [90, pytest.param(100, marks=pytest.mark.slow)]
)
_ODD = (
    "words nodes depth max_depth blocks vocab packed_rows s_bits s_table s_path s_slots s_requests "
    "s_report first width expansions budget known capacity longest groups deepest columns spare "
    "s_tokens s_texts kinds_each s_logits rows s_mask s_counts s_words s_offsets start_len end_len "
    "forced_len"
)
ODD = set(_ODD.split())
"""Numbers that need not be multiples of 16."""


def compile_for(
    kernel: Any,
    warps: int,
    stages: int = 3,
    types: Mapping[str, str] = POINTERS,
    capability: int = 90,
    options: Mapping[str, Any] = MappingProxyType({}),
    **constants: Any,
) -> Any:
    """Compile with these constants, and return Triton's compiled kernel."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or (signature[n] == "i32" and n not in ODD)
    }
    values = {(names.index(n),): value for n, value in constants.items()}
    return triton.compile(
        ASTSource(kernel, signature, values, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, **options},
    )


def compiled(kernel: Any, warps: int, *given: Any, **constants: Any) -> dict[str, int]:
    """Compile as `compile_for` does, and return what `used_by` says."""
    return used_by(compile_for(kernel, warps, *given, **constants))


def used_by(result: Any) -> dict[str, int]:
    """Return the registers and bytes of stack per thread, and the bytes of shared memory."""
    text = _dumped(result, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    shared = result.metadata.shared
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": shared}


def loops(result: Any) -> list[list[str]]:
    """Return the instructions of each loop of a compiled kernel: what a branch jumps back over."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", _dumped(result, "-sass"))
    lines = [(int(address, 16), text) for address, text in found]
    branches = [
        (int(target[1], 16), address)
        for address, text in lines
        if (target := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text))
    ]
    assert branches, "the end of every kernel is a branch to itself"
    return [
        [text for address, text in lines if first <= address <= last]
        for first, last in branches
        if first < last
    ]


def _dumped(result: Any, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        dump = [TOOLS / "cuobjdump", what, file.name]
        return subprocess.run(dump, capture_output=True, text=True, check=True).stdout
