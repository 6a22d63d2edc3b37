"""Logits of heads that draft from hidden states, in float64 and plain torch, written from the papers.

EAGLE-3: Li et al. 2025 (https://arxiv.org/abs/2503.01840) and the layout of its files. Multi-token prediction (MTP):
DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.2.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.feature_heads import read_weights
from tests.helpers.mtp_checkpoints import QWEN, block_config


@torch.no_grad()
def target_states(model: PreTrainedModel, tokens: Tensor, depths: list[int]) -> Tensor:
    """The states that enter the layers `depths`, next to each other, in float64. tokens: [T]. Returns [T, E * D].

    A depth of the number of layers is the state that leaves the last one, before the final norm.
    """
    layers: Any = model.get_decoder().layers
    last: list[Tensor] = []
    handle = layers[-1].register_forward_hook(lambda *call: last.append(call[2][0] if isinstance(call[2], tuple) else call[2]))
    try:
        states = model(tokens[None], output_hidden_states=True).hidden_states
    finally:
        handle.remove()
    return torch.cat([(states[depth] if depth < len(layers) else last[0])[0] for depth in depths], -1).double()


@torch.no_grad()
def normed_states(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The states after the final norm, in float64. tokens: [T]. Returns [T, D]."""
    return model.get_decoder()(tokens[None]).last_hidden_state[0].double()


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class HeadReference:
    """What all heads share: columns, and the chain of drafts.

    Column p pairs the state of token p with token p + 1, at position p, and its output predicts token p + 2. Each draft adds
    a column with the state that is fed back. All columns before it are the real ones of the text, then those of its drafts.

    D: size of the target's states. E: how many of them. d: size of the head's states. V: size of the target's vocabulary.
    """

    def read_states(self, states: Tensor) -> Tensor:
        """[T, E * D] -> [T, d]."""
        raise NotImplementedError

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        """What enters the layer. tokens: [n]. states: [n, d]. Returns [n, w]."""
        raise NotImplementedError

    def layer(self, entering: Tensor, positions: Tensor) -> Tensor:
        """Causal. entering: [n, w]. positions: [n]. Returns [n, d]."""
        raise NotImplementedError

    def feed_back(self, hidden: Tensor) -> Tensor:
        """The state of the next draft's column. [d] -> [d]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the layer's output, [d] -> [V]; -inf for tokens that the head cannot draft."""
        raise NotImplementedError

    def draft_positions(self, columns: int, drafts: int) -> Tensor:
        """Positions of real columns, then those of drafts. Returns [columns + drafts]."""
        return torch.arange(columns + drafts)

    def chain(self, states: Tensor, tokens: Tensor, depths: int, drafts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The logits of the drafts after one text, and the drafts.

        states: [T, E * D], of tokens 0 to T - 1. tokens: [T + 1]. drafts: [depths - 1] or longer, read in the place of the
        greedy ones. Returns logits [depths, V] and drafts [depths].
        """
        found, chosen = [], []
        hidden, following = self.read_states(states), tokens[1:]
        for depth in range(depths):
            positions = self.draft_positions(len(states), depth)
            output = self.layer(self.enter(following, hidden), positions)[-1]
            found.append(self.logits(output))
            greedy = found[-1].argmax()
            chosen.append(greedy if drafts is None or depth >= len(drafts) else drafts[depth])
            hidden = torch.cat([hidden, self.feed_back(output)[None]])
            following = torch.cat([following, chosen[-1][None]])
        return torch.stack(found), torch.stack(chosen)

    def draft_logits(self, states: Tensor, tokens: Tensor, drafts: Tensor) -> Tensor:
        """Logits at every depth, from every column. states: [T, E * D]. tokens: [T + 1]. drafts: [T, K - 1], which follow
        tokens[p + 1]. Returns [T, K, V]."""
        depths = drafts.shape[1] + 1
        texts = ((states[: p + 1], tokens[: p + 2], depths, drafts[p]) for p in range(len(states)))
        return torch.stack([self.chain(*text)[0] for text in texts])


class Eagle3Reference(HeadReference):
    """The head of a folder in EAGLE's layout or in that of speculators. Attention, norms and frequencies are written out.

    embedding: the target's weight [V, D]; the folder's own one is taken if there is one. head: the target's weight [V, D], for
    folders without an LM head.
    """

    def __init__(self, folder: Path, embedding: Tensor | None = None, head: Tensor | None = None) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.flags = {**config, **config.get("eagle_config", {})}
        self.config: dict[str, Any] = config.get("transformer_layer_config", config)
        self.weights: dict[str, Tensor] = {}
        for name, weight in read_weights(folder).items():
            short = name.removeprefix("model.").replace("midlayer.", "layers.0.")
            self.weights[short] = weight.double() if weight.is_floating_point() else weight
        self.vocab = self.config["vocab_size"]
        own = self.weights.get("embed_tokens.weight")
        self.embedding = embedding.detach().double() if own is None and embedding is not None else own
        if "lm_head.weight" not in self.weights and head is not None:
            self.weights["lm_head.weight"] = head.detach().double()
        rows = len(self.weights["lm_head.weight"])
        self.ids = torch.arange(rows) + self.weights.get("d2t", torch.zeros(rows, dtype=torch.int64))

    def norm(self, values: Tensor, name: str) -> Tensor:
        return rms_norm(values, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, values: Tensor, name: str) -> Tensor:
        product = values @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return product if bias is None else product + bias

    def read_states(self, states: Tensor) -> Tensor:
        if self.flags.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        if self.flags.get("fc_norm"):
            parts = sum(name.startswith("fc_norm.") for name in self.weights)
            states = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(states.chunk(parts, -1))], -1)
        return self.linear(states, "fc")

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        assert self.embedding is not None
        return torch.cat([self.embedding[tokens], states], -1)

    def layer(self, entering: Tensor, positions: Tensor) -> Tensor:
        embedded, state = entering.chunk(2, -1)
        normed = self.norm(state, "layers.0.hidden_norm")
        residual = normed if self.flags.get("norm_before_residual") else state
        both = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), normed], -1)
        hidden = residual + self.attention(both, positions)
        middle = self.norm(hidden, "layers.0.post_attention_layernorm")
        gate, up = (self.linear(middle, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        return hidden + self.linear(nn.functional.silu(gate) * up, "layers.0.mlp.down_proj")

    def attention(self, entering: Tensor, positions: Tensor) -> Tensor:
        place, count, size = "layers.0.self_attn", len(entering), self.config["head_dim"]
        query, key, value = (self.linear(entering, f"{place}.{name}_proj").view(count, -1, size) for name in "qkv")
        if f"{place}.q_norm.weight" in self.weights:
            query, key = self.norm(query, f"{place}.q_norm"), self.norm(key, f"{place}.k_norm")
        query, key = self.rotate(query, positions), self.rotate(key, positions)
        shared = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), value)
        return self.linear(mixed.reshape(count, -1), f"{place}.o_proj")

    def rotate(self, values: Tensor, positions: Tensor) -> Tensor:
        """Pairs (i, i + size / 2) are turned by position * frequency i. values: [n, heads, size]."""
        angles = positions.double()[:, None, None] * self.frequencies()
        first, second = values.chunk(2, -1)
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(turned, -1)

    def frequencies(self) -> Tensor:
        """theta^(-2i / size), [size / 2]; Llama 3 divides the long waves by a factor, with a ramp in between."""
        known = {"rope_theta": self.config.get("rope_theta"), **(self.config.get("rope_scaling") or {})}
        settings = {**known, **self.config.get("rope_parameters", {})}
        size, kind = self.config["head_dim"], settings.get("rope_type", settings.get("type", "default"))
        plain = settings["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        if kind == "default":
            return plain
        if kind == "linear":
            return plain / settings["factor"]
        assert kind == "llama3", kind
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        waves = settings["original_max_position_embeddings"] * plain / (2 * math.pi)
        share = ((waves - low) / (high - low)).clamp(0, 1)  # how much of the frequency stays
        return plain * share + plain / settings["factor"] * (1 - share)

    def feed_back(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden, "norm") if self.flags.get("norm_output") else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        found = torch.full((self.vocab,), -math.inf, dtype=torch.float64)
        found[self.ids] = self.linear(self.norm(hidden, "norm"), "lm_head")
        return found


def eagle3_draft_logits(
    folder: Path, embedding: Tensor, head: Tensor, states: Tensor, tokens: Tensor, drafts: Tensor
) -> Tensor:
    """`HeadReference.draft_logits` of a folder. embedding, head: the target's weights [V, D]."""
    return Eagle3Reference(folder, embedding, head).draft_logits(states, tokens, drafts)


class Oracle(NamedTuple):
    """A head that speculators has saved, and its logits [T, K, S] at every depth. states: [T, E * D]. tokens: [T + 1].
    drafts: [T, K - 1]. The target has 8 layers, states of 16 and a vocabulary of 40."""

    folder: Path
    states: Tensor
    tokens: Tensor
    drafts: Tensor
    logits: Tensor


def speculators_oracles() -> dict[str, Oracle]:
    """What tests/helpers/speculators_oracle.py has written. Drafts are the text's own tokens, with zeros after its end."""
    oracles: dict[str, Oracle] = {}
    for folder in sorted((Path(__file__).parent / "records" / "speculators_eagle3").iterdir()):
        given = load_file(folder / "oracle.st")
        count, depths, _ = given["logits"].shape
        longer = torch.cat([given["tokens"][2:], torch.zeros(depths, dtype=torch.int64)])
        drafts = longer.unfold(0, depths - 1, 1)[:count]
        oracles[folder.name] = Oracle(folder, given["states"].double(), given["tokens"], drafts, given["logits"].double())
    return oracles


QWEN_NAMES = {
    **{"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"},
    **{"eh_proj": "fc", "shared_head.norm": "norm"},
}
"""DeepSeek's names: Qwen's."""


class MtpReference(HeadReference):
    """The MTP layer of a checkpoint. Norms, projections, head and chain are written out.

    The decoder layer is transformers' own class in float64, with weights that are put in one by one. It runs over all columns
    from the first, with a causal mask and without a cache. transformers routes to experts, and turns positions into angles,
    in float32.

    feedback: "normed": the state after the norm before the head is fed back; "raw": the state before it.
    """

    def __init__(self, folder: Path, feedback: str = "normed", layer: int = 0) -> None:
        self.config: Any = AutoConfig.from_pretrained(folder).get_text_config()
        self.feedback, self.offset = feedback, float(self.config.model_type in QWEN)
        weights = {name.replace("model.language_model.", "model."): one.double() for name, one in read_weights(folder).items()}
        own = f"model.layers.{self.config.num_hidden_layers + layer}."
        if self.offset:
            own = f"mtp.layers.{layer}."
            weights |= {f"{own}{ours}.weight": weights[f"mtp.{theirs}.weight"] for ours, theirs in QWEN_NAMES.items()}
        self.weights = {name.removeprefix(own): weight for name, weight in weights.items() if name.startswith(own)}
        self.weights.setdefault("embed_tokens.weight", weights["model.embed_tokens.weight"])
        self.weights.setdefault("shared_head.head.weight", weights["lm_head.weight"])
        self.weights.setdefault("shared_head.norm.weight", weights["model.norm.weight"])
        self.decoder = _block(self.config, self.weights)

    def norm(self, values: Tensor, name: str) -> Tensor:
        return rms_norm(values, self.weights[f"{name}.weight"] + self.offset, self.config.rms_norm_eps)

    def read_states(self, states: Tensor) -> Tensor:
        return states

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        embedded = self.norm(self.weights["embed_tokens.weight"][tokens], "enorm")
        return torch.cat([embedded, self.norm(states, "hnorm")], -1) @ self.weights["eh_proj.weight"].T

    @torch.no_grad()
    def layer(self, entering: Tensor, positions: Tensor) -> Tensor:
        count = len(entering)
        mask = torch.full((count, count), -math.inf, dtype=torch.float64).triu(1)[None, None]
        angles = self.decoder.rotary_emb(entering[None], positions[None])
        block = self.decoder.layers[0]
        found = block(entering[None], attention_mask=mask, position_ids=positions[None], position_embeddings=angles)
        return (found[0] if isinstance(found, tuple) else found)[0]

    def feed_back(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden, "shared_head.norm") if self.feedback == "normed" else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden, "shared_head.norm") @ self.weights["shared_head.head.weight"].T


@torch.no_grad()
def _block(config: Any, weights: dict[str, Tensor]) -> Any:
    """A decoder in float64 with one layer, made of the tensors of an MTP layer. Experts that are stored one by one are fused:
    gate and up to [E, 2 * f, d], down to [E, d, f]."""
    single = block_config(config)
    single._experts_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(single, attn_implementation="eager", dtype=torch.float64).eval()
    for name, parameter in model.get_decoder().layers[0].state_dict().items():
        if name in weights:
            parameter.copy_(weights[name])
            continue
        parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
        for expert, values in enumerate(parameter):
            values.copy_(torch.cat([weights[f"mlp.experts.{expert}.{part}_proj.weight"] for part in parts]))
    return model.get_decoder()


def mtp_draft_logits(folder: Path, states: Tensor, tokens: Tensor, drafts: Tensor, feedback: str = "normed") -> Tensor:
    """`HeadReference.draft_logits` of a checkpoint. states: after the target's final norm, `normed_states`."""
    return MtpReference(folder, feedback).draft_logits(states, tokens, drafts)
