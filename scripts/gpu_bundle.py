"""Bring a folder of packages to a GPU machine without network, in parts.

python gpu_bundle.py build FOLDER          compile FlashInfer's modules of the GPU suite for an
                                           H100 or H200, without one, into FlashInfer's package
                                           in FOLDER; needs it in PYTHONPATH, and nvcc
python gpu_bundle.py pack FOLDER PARTS     write PARTS/1, PARTS/2, …, of at most 36 MiB each
python gpu_bundle.py unpack PARTS FOLDER   on that machine, when all parts have come
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dyntree_kernels.cuda.flashinfer_variant import Module

PART = 36 << 20
"""Most bytes of a part."""
_OF = "-of-"


def pack(folder: Path, parts: Path, most: int = PART) -> list[Path]:
    """Write the files of a folder as one archive in parts of at most ``most`` bytes.

    A part's name is its number, that of all, and a digest of all.
    """
    packed = io.BytesIO()
    with lzma.open(packed, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        archive.add(folder, ".", filter=lambda each: None if "__pycache__" in each.name else each)
    whole = packed.getbuffer()
    digest, count = hashlib.sha256(whole).hexdigest(), -(-len(whole) // most)
    written = []
    for number in range(count):
        part = parts / str(number + 1) / f"{number + 1}{_OF}{count}-{digest}"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(whole[number * most : (number + 1) * most])
        written.append(part)
    return written


def unpack(parts: Path, folder: Path) -> None:
    """Write the files of the parts below ``parts`` into a folder.

    Raises:
        ValueError: if a part is missing, is not as it was packed, or is of another archive.
    """
    found = sorted(parts.rglob(f"*{_OF}*-*"), key=lambda part: int(part.name.partition(_OF)[0]))
    numbers = [part.name.partition(_OF)[0] for part in found]
    named = {part.name.partition(_OF)[2] for part in found}
    count, _, digest = next(iter(named), "1-").partition("-")
    if len(named) > 1 or numbers != [str(number + 1) for number in range(int(count))]:
        raise ValueError(f"{parts} needs all parts of one archive; it has {numbers} of {named}")
    whole = b"".join(part.read_bytes() for part in found)
    if hashlib.sha256(whole).hexdigest() != digest:
        raise ValueError(f"the parts in {parts} are not as they were packed: send them again")
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:xz") as archive:
        archive.extractall(folder, filter="data")


def keep(modules: Sequence[Module], package: Path) -> None:
    """Compile FlashInfer's modules, and put them where its package looks for built ones."""
    from dyntree_kernels.cuda.flashinfer_variant import build

    for module in modules:
        build(module, lambda line: print(line, file=sys.stderr))
        library = module.spec().get_library_path()
        kept = package / "data" / "aot" / library.stem / library.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, kept)


def compiled(folder: Path) -> None:
    """Compile what `make gpu-kernels` and the GPU suite run. The driver's library is made up."""
    with tempfile.TemporaryDirectory() as scratch:
        made_up = ["cc", "-shared", "-x", "c", "/dev/null", "-o", f"{scratch}/libcuda.so"]
        subprocess.run([*made_up, "-Wl,-soname,libcuda.so.1"], check=True)
        os.environ |= {
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_WORKSPACE_BASE": scratch,
            "FLASHINFER_EXTRA_LDFLAGS": f"-L{scratch}",
        }
        import torch

        from dyntree_kernels.cuda.flashinfer_variant import Variant
        from dyntree_kernels.cuda.xqa import Xqa

        bf16 = torch.bfloat16
        keep([Variant(bf16, bf16, 128), Xqa(bf16, 128, 4, 16)], folder / "flashinfer")


if __name__ == "__main__":
    asked, *paths = sys.argv[1:]
    {"build": compiled, "pack": pack, "unpack": unpack}[asked](*map(Path, paths))
