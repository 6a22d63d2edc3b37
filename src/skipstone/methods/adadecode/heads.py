"""AdaDecode's exit heads, small LM heads at middle layers (section 2.1), and their files.

A head normalises the state h after its layer with the model's final norm and predicts softmax(E* T h). E* is the model's own LM
head; T is one small matrix per layer.
"""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skipstone.assets import HEADS
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.fetching import fetch, hub_name
from skipstone.models.per_model_cache import PerModelCache
from skipstone.models.weight_version import model_version
from skipstone.utils.files import hidden_folder, install, write_json
from skipstone.utils.settings_files import SettingsPart, read_json

VERSION = 1  # of the format of a card
WEIGHTS = "exit_heads.safetensors"
CARD = "exit_heads.json"
ORIGINAL = "original"  # the kind of heads that are the model's own LM head
_LOADED: PerModelCache["ExitHeads"] = PerModelCache()
_FITTED: PerModelCache[tuple[int, "ExitHeads"]] = PerModelCache()  # (version of the weights that were copied, the copy)
Kind = Literal["square", "low_rank", "full", "original"]


class HeadsCard(SettingsPart):
    """Description of a folder of heads, stored with it.

    model: fingerprint of the weights; name: the model's. layers: for each head, the number of layers before it. kind: "square":
    T of d x d, as in the paper; "low_rank": T = I + B A; "full": a separate LM head of V x d; "original": no parameters.
    vocabulary: size of the heads' shortlist; None for all tokens. hidden_size: d, the input size of the LM head. norm: the norm
    before a head, always the model's "final" one. training, metrics: for readers.
    """

    version: int = VERSION
    model: str
    name: str = ""
    layers: tuple[int, ...] = Field(min_length=1)
    kind: Kind = "square"
    rank: int | None = None
    vocabulary: int | None = Field(default=None, ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    norm: Literal["final"] = "final"
    training: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)


class LowRank(nn.Module):
    """T = I + B A. A: [r, d], initially random. B: [d, r], initially zero."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, rank, bias=False, dtype=torch.float32, device="cpu")
        self.up = nn.Linear(rank, size, bias=False, dtype=torch.float32, device="cpu")
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return states + self.up(self.down(states))


class ExitHeads(nn.Module):
    """One head for each of `card.layers`. A new T is the identity. A new full head is zero until `start_from` copies E*.

    shortlist: [S] int64, ascending ids that the heads predict; None for all.
    """

    shortlist: Tensor | None

    def __init__(self, card: HeadsCard) -> None:
        super().__init__()
        if (card.kind == "low_rank") != (card.rank is not None) or (card.rank or 1) < 1:
            raise ValueError(
                f"heads of kind {card.kind!r} and rank={card.rank}: low_rank needs a rank of at least 1, other kinds have none"
            )
        self.card = card
        self.heads = nn.ModuleList(_head(card) for _ in card.layers)
        self.register_buffer(
            "shortlist", None if card.vocabulary is None else torch.arange(card.vocabulary, dtype=torch.int64, device="cpu")
        )

    def states(self, index: int, normed: Tensor) -> Tensor:
        """T h of head number `index`, or h if it has no T. normed: [..., d]. Returns [..., d]."""
        return normed if self.card.kind in ("full", ORIGINAL) else self.heads[index](normed)

    @property
    def linear(self) -> bool:
        """Whether every head is E* after at most one matrix (`transform`), without hooks and overridden methods."""
        inherited = all(getattr(type(self), name) is getattr(ExitHeads, name) for name in ("logits", "states"))
        return inherited and self.card.kind in ("square", ORIGINAL) and all(map(_is_plain, self.heads))

    def transform(self, index: int) -> Tensor | None:
        """T [d, d] of head number `index`; None for the identity."""
        return None if self.card.kind == ORIGINAL else self.heads[index].weight  # type: ignore[return-value]

    def logits(self, model: ModelRunner, index: int, hidden: Tensor, shortlist: Tensor | None = None) -> Tensor:
        """Logits of head number `index` from states after its layer. hidden: [B, n, d]. shortlist: as in
        `ModelRunner.project`. Returns [B, n, V] float32."""
        return model.project(*self.projected(index, model.normed(hidden)), shortlist)

    def projected(self, index: int, normed: Tensor) -> tuple[Tensor, nn.Module | None]:
        """The inputs of `ModelRunner.project` for head number `index`: (states [..., d], its own LM head or None for the
        model's).

        normed: [..., d]. Heads in training may have a finer dtype than the model."""
        lm_head = self.heads[index] if self.card.kind == "full" else None
        states = self.states(index, normed if self.dtype is None else normed.to(self.dtype))  # [..., d]
        return states if lm_head is not None else states.to(normed.dtype), lm_head

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the weights; None if there are none."""
        return next((weight.dtype for weight in self.parameters()), None)

    def start_from(self, model: ModelRunner) -> None:
        """Initialise full heads as copies of the model's LM head."""
        if self.card.kind == "full":
            with torch.no_grad():
                for head in self.heads:
                    head.weight.copy_(model.head.weight)  # type: ignore[operator, union-attr]

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write a folder of heads atomically. dtype: of the stored weights, None for their own."""
        state = self.state_dict()
        dtypes = {name: dtype if tensor.is_floating_point() else None for name, tensor in state.items()}  # ids stay int64
        weights = {name: tensor.detach().to("cpu", dtypes[name]).contiguous() for name, tensor in state.items()}
        try:
            with hidden_folder(folder) as hidden:
                save_file(weights, hidden / WEIGHTS, metadata={"format": "pt"})
                write_json(hidden / CARD, self.card.model_dump(mode="json"))
                install(hidden, folder, (WEIGHTS, CARD))
        except SafetensorError as error:
            raise OSError(f"the heads could not be written to {folder}: {error}") from error


def _is_plain(head: nn.Module) -> bool:
    """Whether a module is a matrix or the identity, without hooks and with its class's forward."""
    changed = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    return type(head) in (nn.Linear, nn.Identity) and not changed


def _head(card: HeadsCard) -> nn.Module:
    size = card.hidden_size
    if card.kind == ORIGINAL:
        return nn.Identity()
    if card.kind == "low_rank":
        return LowRank(size, card.rank or 1)
    outputs = size if card.kind == "square" else card.vocab_size
    head = nn.Linear(size, outputs, bias=False, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        head.weight.zero_()
        if card.kind == "square":
            head.weight.fill_diagonal_(1.0)
    return head


def usual_layers(depth: int) -> tuple[int, ...]:
    """The paper's exits, L/4, L/2 and 3L/4 (8, 16 and 24 of 32 layers)."""
    return tuple(sorted({max(1, round(depth * quarter / 4)) for quarter in (1, 2, 3)} - {depth}))


def original_heads(model: ModelRunner, layers: tuple[int, ...] = ()) -> ExitHeads:
    """The model's own LM head at middle layers (the ablation of Table 3)."""
    chosen = layers or usual_layers(model.depth)
    heads = _cached(model, (ORIGINAL, chosen), lambda: ExitHeads(new_card(model, chosen, ORIGINAL)))
    heads.card = heads.card.model_copy(update={"model": model.fingerprint})  # the LM head may have changed
    return heads


def heads_fitting(heads: ExitHeads, model: ModelRunner) -> ExitHeads:
    """Heads on a model's device and in its dtype, copied if necessary. ValueError for another model's heads."""
    _check_model(heads.card, model, "heads=")
    weight = next(heads.parameters(), None)
    if weight is None or (weight.device, weight.dtype) == (model.device, model.dtype):
        return heads
    version = model_version(heads).weights
    key = str(model.device), str(model.dtype), heads
    return _FITTED.get(
        model.model, key, lambda: (version, _ready(copy.deepcopy(heads), model)), lambda cached: cached[0] == version
    )[1]


def _ready(heads: ExitHeads, model: ModelRunner) -> ExitHeads:
    return heads.to(model.device, model.dtype).eval().requires_grad_(False)


def _cached(model: ModelRunner, key: Any, make: Callable[[], ExitHeads]) -> ExitHeads:
    """Heads from the cache of a model on its present device and in its present dtype."""
    return _LOADED.get(model.model, (str(model.device), str(model.dtype), key), make)


def new_card(model: ModelRunner, layers: tuple[int, ...], kind: Kind, rank: int | None = None, **more: Any) -> HeadsCard:
    """The card of new heads for a model. more: further fields. ValueError as in `check_layers`."""
    check_layers(layers, model.depth)
    vocab, size = model.head.weight.shape
    return HeadsCard(model=model.fingerprint, layers=layers, kind=kind, rank=rank, hidden_size=size, vocab_size=vocab, **more)


def check_layers(layers: tuple[int, ...], depth: int) -> None:
    """ValueError unless the layers are in increasing order and lie between 1 and L - 1."""
    if list(layers) != sorted(set(layers)) or not layers or layers[0] < 1 or layers[-1] >= depth:
        raise ValueError(f"exit heads stand after layers 1 to {depth - 1} of this model, in order, found {list(layers)}")


def load_heads(source: str | Path, model: ModelRunner) -> ExitHeads:
    """Heads of a model, on its device and in its dtype. They are cached until their file changes.

    source: a folder, a hub id (ORG/NAME or ORG/NAME@REVISION) or a name of HEADS. OSError if there is no such source;
    ValueError for damaged files, files without heads and another model's heads.
    """
    if not isinstance(source, (str, Path)):
        raise ValueError(f"heads must be a folder, a hub id or one of {', '.join(HEADS)}, found {source!r}")
    file = None if source in HEADS else Path(source).expanduser() / WEIGHTS
    modified = file.stat().st_mtime_ns if file is not None and file.is_file() else None
    return _cached(model, (str(source), modified, model.fingerprint), lambda: _read(source, model))


def _read(source: str | Path, model: ModelRunner) -> ExitHeads:
    folder = _folder_of(source)
    card = _read_card(folder, source)
    _check_model(card, model, source)
    return _ready(_with_weights(card, folder, source), model)


def read_heads(folder: Path) -> ExitHeads:
    """The heads in a folder, of any model. OSError if there are none; ValueError for files that are damaged or do not match."""
    return _with_weights(_read_card(folder, folder), folder, folder)


def _with_weights(card: HeadsCard, folder: Path, source: str | Path) -> ExitHeads:
    try:
        weights = load_file(folder / WEIGHTS) if card.kind != ORIGINAL or (folder / WEIGHTS).exists() else {}
        heads = ExitHeads(card)
        heads.load_state_dict(weights)
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise ValueError(f"{source}: {WEIGHTS} is damaged or does not fit its {CARD}: {error}") from error
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise ValueError(f"{source}: {WEIGHTS} holds numbers that are not finite")
    if "shortlist" in weights and weights["shortlist"].dtype is not torch.int64:
        raise ValueError(f"{source}: the shortlist in {WEIGHTS} must be int64, found {weights['shortlist'].dtype}")
    ids = heads.shortlist
    if ids is not None and (ids[0] < 0 or ids[-1] >= card.vocab_size or not bool((ids.diff() > 0).all())):
        raise ValueError(
            f"{source}: the shortlist in {WEIGHTS} must hold ids from 0 to {card.vocab_size - 1} in ascending order"
        )
    return heads


def are_loaded(model: ModelRunner) -> bool:
    """Whether heads of a model were loaded in this process."""
    return bool(_LOADED.known(model.model))


def bundled_name_for(model: ModelRunner) -> str | None:
    """The name of the first bundled heads of a model; None if there are none."""
    return next((name for name, card in fitting_heads(model).items() if card.model == model.fingerprint), None)


def fitting_heads(model: ModelRunner) -> dict[str, HeadsCard]:
    """The cards of bundled heads, by name, for models of this size. The model's weights are not read."""
    shape = tuple(reversed(model.head.weight.shape))
    return {name: card for name, card in _bundled().items() if (card.hidden_size, card.vocab_size) == shape}


@cache
def _bundled() -> dict[str, HeadsCard]:
    return {name: _read_card(folder, name) for name, folder in HEADS.items() if (folder / CARD).is_file()}


def _folder_of(source: str | Path) -> Path:
    if source in HEADS:
        return HEADS[str(source)]
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / CARD).is_file():
            raise FileNotFoundError(2, f"no exit heads ({CARD}) in the folder", str(source))
        return folder
    if folder.exists() or hub_name(source) is None or "/" not in str(source):
        raise FileNotFoundError(2, f"no folder of exit heads, and no hub id; bundled are {', '.join(HEADS)}", str(source))
    return fetch(str(source), CARD, WEIGHTS)


def _read_card(folder: Path, source: str | Path) -> HeadsCard:
    return read_json(folder / CARD, HeadsCard, VERSION, "exit heads", source)


def _check_model(card: HeadsCard, model: ModelRunner, source: str | Path) -> None:
    vocab, size = model.head.weight.shape
    if (card.vocab_size, card.hidden_size) != (vocab, size):
        raise ValueError(
            f"{source} holds heads for a vocabulary of {card.vocab_size} and states of {card.hidden_size}, this model has "
            f"{vocab} and {size}"
        )
    check_layers(card.layers, model.depth)
    if card.model != (here := model.fingerprint):
        raise ValueError(f"{source} holds the heads of another model ({card.name or card.model}; this one is {here})")
