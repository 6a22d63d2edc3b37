"""Finds a checkpoint's layers for multi-token prediction (MTP) by the names of its tensors."""

import re
from collections.abc import Collection, Mapping
from itertools import product
from typing import NamedTuple

OWN_NAME = re.compile(r"(^|\.)mtp(_\w+)?\.")
"""In names of tensors: MTP layers with a name of their own."""
PARTS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|mtp_\w+)\b")
"""In names of tensors: parts of an MTP layer in the list of a model's layers."""
EH_PROJ, ENORM, HNORM = "eh_proj.weight", "enorm.weight", "hnorm.weight"
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
BLOCK = "model.layers.0."
"""Our names of an MTP layer's tensors. Those from NORM on are transformers' names in a model with one layer."""
DEEPSEEK: Mapping[str, str] = {
    **{name: name for name in (EH_PROJ, ENORM, HNORM)},
    **{"shared_head.norm.weight": NORM, "shared_head.head.weight": HEAD, "embed_tokens.weight": EMBEDDING},
}
"""Layout of DeepSeek-V3 and GLM-4.5: our names of the tensors next to those of the block, by their names in the layer."""
QWEN: Mapping[str, str] = {
    **{"fc.weight": EH_PROJ, "pre_fc_norm_embedding.weight": ENORM, "pre_fc_norm_hidden.weight": HNORM, "norm.weight": NORM},
    **{HEAD: HEAD, "embed_tokens.weight": EMBEDDING},
}
"""Layout of Qwen3-Next and Qwen3.5: the same."""
OTHERS = {
    "MiMo": re.compile(r"(^|\.)mtp_layers\."),
    "MiMo-V2 and LongCat": re.compile(r"(^|\.)model\.mtp\."),
    "Step": re.compile(r"\.transformer\.shared_head\."),
    "Ling and Hunyuan": re.compile(r"\.layers\.\d+\.final_layernorm\."),
    "ERNIE": re.compile(r"(^|\.)mtp_(block|linear_proj|emb_norm|hidden_norm)\."),
}
"""Names of tensors that tell other layouts."""


class NoMtpError(ValueError):
    """A checkpoint has no MTP layer that skipstone runs. The message is the end of a sentence about the checkpoint."""


class MtpTensors(NamedTuple):
    """The tensors of a checkpoint's first MTP layer.

    names: in the files, by our names. prefix, block: what the files' names begin with, and where the block's go on. parts:
    DEEPSEEK or QWEN. num_layers: number of MTP layers of the checkpoint.
    """

    names: dict[str, str]
    prefix: str
    block: str
    parts: Mapping[str, str]
    num_layers: int

    @property
    def missing(self) -> list[str]:
        """Our names of tensors that the files lack, as far as other names tell. DeepSeek's layout may lack NORM, too."""
        matches = [match for name in self.names if (match := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name))]
        experts = product(*({match[part] for match in matches} for part in (1, 2, 3)))
        needed = {EH_PROJ, ENORM, HNORM, *map("".join, experts)} | ({NORM} if self.parts is QWEN else set())
        return sorted(needed - {*self.names})

    def name_in_files(self, name: str) -> str:
        """The name in the files of a tensor that they have or lack. name: ours."""
        own = next((part for part, known in self.parts.items() if known == name), self.block + name.removeprefix(BLOCK))
        return self.names.get(name, self.prefix + own)


def find_mtp(names: Collection[str]) -> MtpTensors:
    """The first MTP layer of a checkpoint. names: of its tensors. NoMtpError if it has none, or none in a known layout."""
    own = [name for name in names if OWN_NAME.search(name) or PARTS.search(name)]
    if not own:
        raise NoMtpError("has no MTP layers")
    found = [match for name in own if (match := re.fullmatch(r"(.*\blayers\.(\d+)\.)eh_proj\.weight", name))]
    if found:
        prefix, block, parts = min(found, key=lambda match: int(match[2]))[1], "", DEEPSEEK
    else:
        prefix, block, parts = "mtp.", "layers.0.", QWEN
    inside = [name for name in names if name.startswith(prefix)]
    if other := next((layout for layout, sign in OTHERS.items() if any(map(sign.search, {*own, *inside}))), None):
        raise NoMtpError(f"has MTP layers in the layout of {other}, which skipstone does not run")
    if f"{prefix}{next(iter(parts))}" not in names:
        raise NoMtpError(f"has MTP layers in a layout that skipstone does not know ({min(own)})")
    numbers = {match[2] for match in found} or {
        match[1] for name in inside if (match := re.match(r"mtp\.layers\.(\d+)\.", name))
    }
    rest = {name: name.removeprefix(prefix) for name in inside if not re.match(r"mtp\.layers\.[1-9]", name)}
    ours = {parts.get(part, BLOCK + part.removeprefix(block)): name for name, part in rest.items()}
    return MtpTensors(ours, prefix, block, parts, len(numbers))
