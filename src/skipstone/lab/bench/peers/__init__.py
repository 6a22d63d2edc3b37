"""Peers to compare with: transformers' own decoding, llama.cpp, OpenVINO, a draft model by itself."""

from skipstone.lab.bench.peers.ggml import LlamaCpp
from skipstone.lab.bench.peers.hf import DraftAlone, HFAssisted, HFEarlyExit, HFGenerate, HFGenerateStatic, HFPromptLookup
from skipstone.lab.bench.peers.ov import OpenVino
from skipstone.lab.timing.measure import GenerationBackend

_KINDS = (HFGenerate, HFGenerateStatic, HFEarlyExit, HFPromptLookup, HFAssisted, DraftAlone, LlamaCpp, OpenVino)
PEERS: dict[str, type[GenerationBackend]] = {kind.name: kind for kind in _KINDS}
