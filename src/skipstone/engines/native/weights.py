"""Copies the weights of a transformers model into the panels of the native engine, and describes each family's layer to it."""

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skipstone.engines.host_transfer import dense, pointer
from skipstone.engines.native import threads
from skipstone.engines.native.packed_cache import CachedPanels
from skipstone.engines.native.structs import LayerStruct, MatrixStruct, ModelStruct
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.families import submodule
from skipstone.models.gguf.weights import StoredBlocks, blocks_of, float_bytes
from skipstone.models.layer_variants import ACTIVATIONS, LAYER_VARIANTS
from skipstone.models.mapped_model import Activation, MappedModel
from skipstone.models.packed_weight import PackedWeight
from skipstone.models.quantised_checkpoints import kernel
from skipstone.models.weight_files import DTYPES, FilePlace
from skipstone.models.weight_version import AttributeValues
from skipstone.utils.cached_property import cached_property

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of stored weights and their numbers in the C ABI."""
BFLOAT16_INPUTS = 3
"""The number in the C ABI of bfloat16 weights, if the inputs of their products are rounded to bfloat16."""
QUANTIZED = {"int8": 4, "int4": 5}
"""Types of quantised weights and their numbers in the C ABI."""
BLOCKS = {"Q8_0": 4, "Q4_1": 5, "Q4_0": 6, "Q5_0": 7, "Q4_K": 8, "Q5_K": 9, "Q6_K": 10}
"""GGUF's types of blocks that are computed as they are stored, and their numbers in the C ABI."""
STORED = BLOCKS | {name: TYPES[dtype] for name, dtype in DTYPES.items()}
"""All types of GGUF files that are computed as they are stored."""
QUANTIZED_HEAD = "int8"
"""Type of a quantised LM head, for any type of the layers. Errors of the head go straight into the logits."""
CHUNK = 128 << 20
"""Bytes of one allocation, which serves many matrices. Its last used huge page is partly empty, so chunks are few."""
TRIM_BYTES = 32 << 20
"""Bytes of freed weights after which the allocator is asked to return memory to the system."""
PIECE_WEIGHTS = 2 << 20
"""Weights that one thread packs between two pauses, in about 10 ms."""
LANES = 16
"""Outputs of a panel."""
_OF_TRANSFORMERS = {"SiLUActivation": "silu", "GELUTanh": "gelu_pytorch_tanh", "NewGELUActivation": "gelu_new"}
"""transformers' classes of activations, and their names in a config."""
TORCH_MODULES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout, nn.SiLU)
"""torch's modules that the native engine supports."""


class PanelMemory:
    """Allocates zeroed memory for panels, in huge pages if the system has them.

    The CPU's prefetching stops at the end of a page, and pages of 2 MB have few ends. The memory lives as long as its tensors.
    """

    is_filled = False  # it has no panels yet

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, size: int) -> Tensor:
        """[size] uint8, at a multiple of 64 bytes."""
        aligned_size = -(-size // 64) * 64
        if aligned_size > len(self._free):
            pages = mmap.mmap(-1, max(aligned_size, CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(pages, dtype=torch.uint8)
        taken, self._free = self._free[:size], self._free[aligned_size:]
        return taken


class MemoryRelease:
    """Returns the memory of copied weights to the system.

    A memory-mapped checkpoint is one mapping, which the norms keep alive. So the pages of each matrix are released on their
    own. A later read would load them from the file again.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._freed = 0  # bytes since the last `trim`

    @cached_property
    def _files(self) -> list[tuple[int, int]]:
        """First and last address of every mapping with a path."""
        maps = Path("/proc/self/maps")
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else []
        spans = [line.split(maxsplit=1)[0].split("-") for line in lines if " /" in line]
        return [(int(start, 16), int(end, 16)) for start, end in spans]

    def give_up(self, weight: Tensor) -> None:
        """Release the whole pages of a weight that is mapped from a file. Any other is freed with its last reference."""
        size = weight.numel() * weight.element_size()
        self._freed += size
        if self._freed > TRIM_BYTES:
            self.trim()
        if not weight.is_contiguous():
            return
        start = pointer("a weight", weight, weight.shape, weight.dtype)
        if any(first <= start and start + size <= end for first, end in self._files):
            first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end:
                self._libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)

    def trim(self) -> None:
        """Have the allocator release free memory between used blocks."""
        self._freed = 0
        with suppress(AttributeError):  # another C library than glibc
            self._libc.malloc_trim(ctypes.c_size_t(0))


class Panels:
    """One weight in panels. It may hold several matrices, stacked along its rows.

    matrices: structs of the C ABI, without biases. memory: their panels. dtype: of the weight. type: of the panels, see TYPES
    and QUANTIZED.
    """

    def __init__(self, library: Any, matrices: list[MatrixStruct], memory: list[Tensor], dtype: torch.dtype) -> None:
        self._library, self.matrices, self.memory, self._dtype = library, matrices, memory, dtype
        self.type = matrices[0].type

    def unpacked(self) -> Tensor:
        """The plain weight: as it was stored, or dequantised and rounded to its dtype."""
        return torch.cat([self._rows(matrix).to(self._dtype) for matrix in self.matrices])

    def _rows(self, matrix: MatrixStruct) -> Tensor:
        """[outputs, inputs] float32, read as the embeddings of a model with this tied LM head."""
        ids = torch.arange(matrix.outputs, dtype=torch.int64, device="cpu")
        rows = torch.empty((matrix.outputs, matrix.inputs), dtype=torch.float32, device="cpu")
        model = ModelStruct(hidden=matrix.inputs, embeddings=matrix.outputs, head=matrix)
        model.embedding_scale = model.embedding_multiplier = 1.0
        source = pointer("ids", ids, (matrix.outputs,), torch.int64)
        target = pointer("rows", rows, (matrix.outputs, matrix.inputs), torch.float32)
        self._library.sk_embed(ctypes.addressof(model), source, len(ids), target)
        return rows


class RowSource(NamedTuple):
    """Rows of weights to pack. kind, stride, file, begin: as in the C function `sk_pack`. row_bytes: from a row to the next.
    owner: keeps the rows in memory; `StoredBlocks` without a kernel give rows as float32."""

    kind: int
    stride: int
    file: int
    begin: int
    row_bytes: int
    owner: Any


class NativeWeights:
    """A model's weights in panels, which live as long as this object.

    model: struct of the C ABI. bytes: of the panels that it has packed. rotary: sources of the rotary tables, by their numbers.
    attributes: modules' plain attributes and buffers that were read. memory: the panels of the model in the order of packing.
    ids: of the LM head's rows, [S] int64, ascending; None for 0, 1, 2, ... reads_pairs: embeddings and states enter layer 0.
    quantize: "int8" or "int4" for all matrices, None for their stored dtype. keep_weights: False replaces each matrix by a
    `PackedWeight` after its copy, before the next one is copied. A mapped model keeps its weights, which are read from their
    files without bringing mapped pages into memory.
    pause: called between pieces of the work, which then takes this thread only.
    rounds_inputs: whether inputs of products with bfloat16 weights are rounded to bfloat16. There may be no such products.
    shared: `panels` of another engine. Weights that have such panels of the right type are not packed again. panels: by the ids
    of the model's weights.
    """

    def __init__(  # noqa: PLR0913
        self,
        library: Any,
        model: Any,
        description: DecoderModel,
        quantize: str | None = None,
        keep_weights: bool = True,
        memory: "PanelMemory | CachedPanels | None" = None,
        pause: Callable[[], None] | None = None,
        rounds_inputs: bool = False,
        shared: "Mapping[int, Panels] | None" = None,
    ) -> None:
        self._library, self._referenced, self.bytes, self._quantize = library, [], 0, quantize
        self._shared, self.panels = shared or {}, dict[int, Panels]()
        self.rounds_inputs = rounds_inputs and quantize is None and has_bfloat16_matrices(model)
        self._threads = threads.requested_number() or min(threads.cores(), threads.MAX_THREADS)
        self._pause = pause
        is_mapped = isinstance(model, MappedModel)
        self._chunks, self._head = memory or PanelMemory(), description.head
        self._widened = model.widens_to if is_mapped else None
        self._report_packed = model.report_packed if is_mapped else None
        self._file_places: dict[Tensor, FilePlace] = model.places if is_mapped else {}
        releases = (is_mapped or not keep_weights) and not self._chunks.is_filled
        self._releases = MemoryRelease() if releases else None
        self._weight_places = [] if keep_weights or is_mapped else [part._parameters for part in model.modules()]
        self._attributes: list[tuple[dict[str, Any], str]] = []  # that were read: of which module, and their names
        config, family = model.config, description.family
        self._recipe = LAYER_VARIANTS[config.model_type]
        self.rotary = [one for one in dict.fromkeys(family.rotary) if one is not None]
        depth = len(description.layers)
        layers = (LayerStruct * depth)(*[self._layer(description, index, config) for index in range(depth)])
        self._referenced.append(layers)
        self.reads_pairs = layers[0].norm_of_embedding is not None
        embedding = model.get_input_embeddings()
        tied = embedding.weight is description.head.weight  # then embeddings come from the head's panels
        embedding_type, embedding_address = (0, None) if tied else self._embedding(embedding.weight)
        norm = submodule(description.decoder, family.leaving[0])
        scale = embedding._buffers.get("embed_scale")  # Gemma's
        self.model = ModelStruct(
            hidden=embedding.weight.shape[1],
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=getattr(description.layers[0], family.attention).head_dim,
            intermediate=config.intermediate_size,
            depth=depth,
            vocabulary=description.head.weight.shape[0],
            embeddings=embedding.weight.shape[0],
            layers=ctypes.addressof(layers),
            head=self._matrix(description.head, quantize and QUANTIZED_HEAD),
            embedding=embedding_address,
            embedding_type=embedding_type,
            norm=self._norm(norm),
            feeds_back_normed=int(self._number(model, "norm_output", 0.0)),
            epsilon=float(getattr(norm, _epsilon(norm))),
            embedding_scale=1.0 if scale is None else float(scale),
            embedding_multiplier=self._number(description.decoder, family.input_scale or "", 1.0),
            logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
            logits_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        )
        self.ids: Tensor | None = getattr(model, "ids", None)
        self.memory = [one for panels in self._referenced if isinstance(panels, Panels) for one in panels.memory]
        self.attributes = AttributeValues(self._attributes, [embedding])
        if self._chunks.is_filled:
            self._chunks = PanelMemory()  # for what is packed later
        self._report_packed = None  # it was asked for this work only
        if self._releases is not None:
            self._releases.trim()

    def _embedding(self, weight: Tensor) -> tuple[int, int]:
        """The type and the address of an embedding of its own: panels if it is computed in its blocks, else rows."""
        blocks = blocks_of(weight)
        if blocks is not None and blocks.kind in BLOCKS:
            panels = self._panels_of(weight, [weight.shape[0]], None)
            return panels.type, panels.matrices[0].panels
        rows = weight.detach().contiguous() if blocks is None else blocks.unpacked()
        if isinstance(weight, PackedWeight):  # unpacked into memory of its own
            self.bytes += rows.nbytes
        self._referenced.append(rows)
        return TYPES[rows.dtype], pointer("embeddings", rows, rows.shape, rows.dtype)

    def _number(self, module: Any, name: str, default: float) -> float:
        """A plain attribute of a module, or the default."""
        attributes = vars(module)
        if name not in attributes:
            return default
        self._attributes.append((attributes, name))
        return default if attributes[name] is None else float(attributes[name])

    def _layer(self, description: DecoderModel, index: int, config: Any) -> LayerStruct:
        layer, recipe, quantize = description.layers[index], self._recipe, self._quantize
        attention, mlp = getattr(layer, description.family.attention), layer.mlp
        if recipe.fused:
            heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
            matrices = self._matrices(attention.qkv_proj, [count * attention.head_dim for count in heads], quantize)
            matrices += self._matrices(mlp.gate_up_proj, [config.intermediate_size] * 2, quantize)
        else:
            parts = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
            matrices = [self._matrix(part, quantize) for part in parts]
        norms = {f"norm_{place}": getattr(layer, name) for place, name in recipe.norms.items()}
        if hasattr(layer, "hidden_norm"):  # an EAGLE-3 head's
            norms |= {"norm_of_embedding": layer.input_layernorm, "norm_before_attention": layer.hidden_norm}
        if recipe.query_norm:
            norms |= {"norm_q": attention.q_norm, "norm_k": attention.k_norm}
        rotates = bool(self._number(attention, "use_rope", 1.0))
        source = description.family.rotary[index]
        return LayerStruct(
            **dict(zip(("q", "k", "v", "gate", "up"), matrices, strict=True)),
            **{place: self._norm(norm) for place, norm in norms.items()},
            o=self._matrix(attention.o_proj, quantize),
            down=self._matrix(mlp.down_proj, quantize),
            norm_whole=recipe.query_norm == "whole",
            norm_before_residual=int(self._number(layer, "norm_before_residual", 0.0)),
            window=description.reaches[index].window or 0,
            rotary=self.rotary.index(source) if rotates and source is not None else -1,
            activation=activation_number(getattr(mlp, recipe.activation)),
            scale=self._number(attention, "scaling", 1.0),
            softcap=self._number(attention, "attn_logit_softcapping", 0.0),
            residual=self._number(layer, "residual_multiplier", 1.0),
        )

    def rows_of_head(self, ids: Tensor) -> tuple[MatrixStruct, list[Tensor]]:
        """Some rows of the LM head with the same bits, and the tensors that they need. ids: [S] int64.

        The first rows share the head's panels, others are copied. ValueError for unknown ids.
        """
        head = self.model.head
        if self.ids is not None:
            rows = torch.searchsorted(self.ids, ids).clamp(max=head.outputs - 1)
            if not torch.equal(self.ids[rows], ids):
                raise ValueError("a shortlist must name ids that the head has")
            ids = rows
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= head.outputs:
            raise ValueError(f"a shortlist must name ids from 0 to {head.outputs - 1}, at least one")
        if torch.equal(ids, torch.arange(len(ids), dtype=torch.int64, device="cpu")):
            return MatrixStruct(head.panels, head.bias, len(ids), head.inputs, head.type), []
        size = self._library.sk_packed_bytes(head.type, len(ids), head.inputs)
        panels, bias = self._chunks.take(size), self._head.bias
        rows = MatrixStruct(pointer("panels", panels, (size,), torch.uint8), None, len(ids), head.inputs, head.type)
        self._library.sk_take(ctypes.addressof(head), pointer("ids", ids, (len(ids),), torch.int64), len(ids), rows.panels)
        if bias is None:
            return rows, [panels]
        biases = bias.detach()[ids].float()
        rows.bias = pointer("bias", biases, (len(ids),), torch.float32)
        return rows, [panels, biases]

    def packed_square(self, weight: Tensor, size: int) -> Panels:
        """Another matrix [size, size] in float32 panels."""
        values = dense(weight.detach().float())
        pointer("transform", values, (size, size), torch.float32)  # checks its shape
        return self._packed(values, [size], None)

    def multiplier(self, module: nn.Linear) -> ModelStruct:
        """A model without layers, with a linear layer as its LM head. Its weight is quantised as those of layers."""
        matrix = self._matrix(module, self._quantize)
        return ModelStruct(hidden=matrix.inputs, vocabulary=matrix.outputs, head=matrix, logits_divisor=1.0)

    def _matrix(self, module: Any, quantize: str | None) -> MatrixStruct:
        return self._matrices(module, [module.weight.shape[0]], quantize)[0]

    def _matrices(self, module: Any, sizes: list[int], quantize: str | None) -> list[MatrixStruct]:
        """A module's weight as matrices of `sizes` outputs with their biases. The rest is as in `_panels_of`."""
        panels = self._panels_of(module.weight, sizes, quantize)
        kind = BFLOAT16_INPUTS if self.rounds_inputs and panels.type == TYPES[torch.bfloat16] else panels.type
        biases = [None] * len(sizes) if module.bias is None else module.bias.detach().split(sizes)
        return [
            MatrixStruct(one.panels, None if bias is None else self._floats(bias), one.outputs, one.inputs, kind)
            for one, bias in zip(panels.matrices, biases, strict=True)
        ]

    def _panels_of(self, weight: Tensor, sizes: list[int], quantize: str | None) -> Panels:
        """A weight as matrices of `sizes` outputs, quantised or as stored: packed now, earlier, or for another engine.

        ValueError for weights that cannot be quantised, or that were given up in another quantisation.
        """
        kind = self._kind(weight, quantize)
        given_up = weight.source if isinstance(weight, PackedWeight) and isinstance(weight.source, Panels) else None
        panels = given_up or self._shared.get(id(weight))
        if given_up is not None and given_up.type != kind and given_up.type in QUANTIZED.values():
            raise ValueError(
                f"quantize={quantize or 'none'!r} needs the weights as they were stored, which this model gave up when it was "
                "quantised: load it again"
            )
        if panels is None or panels.type != kind:
            panels = self._packed(weight, sizes, quantize)
            self.bytes += sum(map(len, panels.memory))
        if self._weight_places and given_up is None and self._releases is not None:
            packed = PackedWeight(panels, weight)
            for place in self._weight_places:
                place |= {name: packed for name, other in place.items() if other is weight}
            self._releases.give_up(weight)
        self._referenced.append(panels)
        self.panels[id(weight)] = panels
        return panels

    def _kind(self, weight: Tensor, quantize: str | None) -> int:
        """The type of a weight's panels."""
        return _unquantised_type(weight, self._widened) if quantize is None else QUANTIZED[quantize]

    def _packed(self, weight: Tensor, sizes: list[int], quantize: str | None) -> Panels:
        """Copy a weight into panels, one matrix for each number of outputs. ValueError for weights that cannot be quantised."""
        kind, source = self._kind(weight, quantize), self._source(weight)
        matrices, memory, first = [], [], 0
        for outputs in sizes:
            size = self._library.sk_packed_bytes(kind, outputs, weight.shape[1])
            memory.append(self._chunks.take(size))
            panels = pointer("panels", memory[-1], (size,), torch.uint8)
            matrices.append(MatrixStruct(panels, None, outputs, weight.shape[1], kind))
            if not self._chunks.is_filled:
                self._pack(matrices[-1], source, first)
            if self._report_packed is not None:
                self._report_packed(outputs * weight.shape[1])
            first += outputs
        return Panels(self._library, matrices, memory, weight.dtype)

    def _source(self, weight: Tensor) -> "RowSource":
        place, blocks = self._file_places.get(weight), blocks_of(weight)
        if blocks is None:
            rows = dense(weight.detach(), free=1)
            address = pointer("a weight", rows, rows.shape, weight.dtype, free=1)
            kind, stride, row_bytes = TYPES[weight.dtype], rows.stride(0), rows.stride(0) * weight.itemsize
        elif blocks.kind in STORED:
            rows = None if place else blocks.rows()
            address = 0 if rows is None else rows.ctypes.data
            kind, stride, row_bytes = STORED[blocks.kind], 0 if blocks.kind in BLOCKS else weight.shape[1], blocks.row_bytes
        else:
            return RowSource(0, weight.shape[1], -1, 0, 0, blocks)
        file, begin = (-1, address) if place is None else place
        return RowSource(kind, stride, file, begin, row_bytes, rows)

    def _pack(self, matrix: MatrixStruct, source: "RowSource", first: int) -> None:
        """Pack the rows of a matrix, `first` and later ones of a source."""
        kind, outputs, inputs = matrix.type, matrix.outputs, matrix.inputs
        pack = self._library.sk_quantize if kind in QUANTIZED.values() and kind != source.kind else self._library.sk_pack
        dequantises = isinstance(source.owner, StoredBlocks)
        in_pieces = dequantises or self._pause is not None
        piece = LANES * max(1, PIECE_WEIGHTS // (LANES * inputs)) if in_pieces else outputs
        for done in range(0, outputs, piece):
            count, begin = min(piece, outputs - done), source.begin + (first + done) * source.row_bytes
            if self._pause is not None:
                self._pause()
            if dequantises:
                rows = source.owner.floats(first + done, first + done + count)
                begin = pointer("rows", rows, rows.shape, torch.float32)
            panels = matrix.panels + self._library.sk_packed_bytes(kind, done, inputs)
            threads_used = 1 if self._pause is not None else self._threads
            pack(kind, source.kind, source.file, begin, source.stride, count, inputs, panels, threads_used)

    def _norm(self, module: Any) -> int:
        self._number(module, _epsilon(module), 0.0)
        return self._floats(module.weight.detach().float() + self._number(module, "offset", self._recipe.norm_offset))

    def _floats(self, values: Tensor) -> int:
        """The address of a float32 copy."""
        copied = values.detach().float().clone(memory_format=torch.contiguous_format)
        self._referenced.append(copied)
        return pointer("norms and biases", copied, values.shape, torch.float32)


def _unquantised_type(weight: Tensor, widened: torch.dtype | None) -> int:
    """The type of a weight's panels. widened: `MappedModel.widens_to`; None for other models."""
    blocks = blocks_of(weight)
    return TYPES[widened or weight.dtype] if blocks is None else STORED.get(blocks.kind, TYPES[torch.float32])


def has_bfloat16_matrices(model: Any) -> bool:
    """Whether an engine that quantises nothing multiplies bfloat16 weights."""
    widened = model.widens_to if isinstance(model, MappedModel) else None
    return any(_unquantised_type(one, widened) == TYPES[torch.bfloat16] for one in packed_weights(model))


def packed_weights(model: Any) -> list[Tensor]:
    """The weights that are packed: all matrices, and the embeddings if they are the LM head's, too."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [one for one in model.parameters() if one.dim() == 2 and (one is head or one is not embedding)]


@dataclass(frozen=True)
class TensorPath:
    """How the native engine computes the matrices of one stored type.

    kind, computed: the types in the files and in the engine, names of GGUF's types, of dtypes or of QUANTIZED. matrices: their
    number. stored_bytes, computed_bytes: in the files and the engine.
    """

    kind: str
    computed: str
    matrices: int
    stored_bytes: int
    computed_bytes: int


def tensor_paths(model: Any, quantize: str | None = None) -> list[TensorPath]:
    """The paths of a model's matrices by their types. An untied embedding is never quantised."""
    found: dict[tuple[str, str], TensorPath] = {}
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    for one in model.parameters():
        if one.dim() == 2:
            quantised = (quantize and QUANTIZED_HEAD) if one is head else None if one is embedding else quantize
            blocks = blocks_of(one)
            kind = str(one.dtype if blocks is None else DTYPES.get(blocks.kind, blocks.kind)).removeprefix("torch.")
            computed = quantised or (kind if blocks is None or blocks.kind in STORED else "float32")
            stored = one.numel() * one.element_size() if blocks is None else blocks.nbytes
            before = found.get((kind, computed), TensorPath(kind, computed, 0, 0, 0))
            counted = before.stored_bytes + stored, before.computed_bytes + matrix_bytes(one, quantised)
            found[kind, computed] = TensorPath(kind, computed, before.matrices + 1, *counted)
    return [*found.values()]


def quantised_bytes(model: Any, quantize: str | None) -> int:
    """Estimated bytes of a model's weights as "int8" or "int4": for every group of 32 the codes, and a scale (int4: also a
    minimum) in float16. None: without quantisation. An untied embedding is left out."""
    head = model.get_output_embeddings().weight
    return sum(matrix_bytes(one, quantize and QUANTIZED_HEAD if one is head else quantize) for one in packed_weights(model))


def embedding_bytes(model: Any) -> int:
    """Bytes of an untied embedding in blocks. Other embeddings need no memory of their own: tied or plain ones."""
    weight = model.get_input_embeddings().weight
    is_head = weight is model.get_output_embeddings().weight
    return 0 if is_head or blocks_of(weight) is None else matrix_bytes(weight, None)


def matrix_bytes(matrix: Tensor, quantize: str | None) -> int:
    """Bytes of one matrix as "int8" or "int4". None: without quantisation."""
    blocks = blocks_of(matrix)
    if quantize is None and blocks is not None:
        return blocks.nbytes if blocks.kind in STORED else float_bytes(blocks)
    bytes_of_32 = {"int8": 34, "int4": 20}.get(quantize or "", 32 * matrix.element_size())
    return math.prod(matrix.shape) * bytes_of_32 // 32


def unsupported(model: Any, description: DecoderModel) -> str | None:
    """The reason why the native engine cannot run a model, as one sentence; None if it can."""
    kind = model.config.model_type
    if description.device.type != "cpu":
        return f"the model is on {description.device}, and the native engine runs on the CPU"
    if kind not in LAYER_VARIANTS:
        return f"the native engine does not know the family {kind} (it knows {', '.join(LAYER_VARIANTS)})"
    for layer in description.layers:
        used = getattr(layer.mlp, LAYER_VARIANTS[kind].activation, None)
        if used is not None and activation_number(used) is None:
            return f"the native engine does not know the activation {type(used).__name__}"
    for name, module in model.named_modules():
        if reason := _unsupported_module(module, type(model).__module__):
            return f"{name or type(model).__name__} {reason}"
    epsilons = sorted({getattr(module, _epsilon(module)) for module in model.modules() if _epsilon(module)})
    if len(epsilons) > 1:
        return f"its norms have different epsilons ({', '.join(map(str, epsilons))}), and the native engine has one for all"
    return None


def activation_number(module: nn.Module) -> int | None:
    """The number of an activation in the C ABI; None for an unsupported one."""
    if isinstance(module, (Activation, nn.SiLU)):
        return module.number if isinstance(module, Activation) else ACTIVATIONS["silu"]
    place, name = type(module).__module__, _OF_TRANSFORMERS.get(type(module).__name__, "")
    return ACTIVATIONS.get(name) if place == "transformers.activations" else None


def _epsilon(module: Any) -> str:
    """The name of a norm's epsilon attribute; empty for a module without one."""
    return next((name for name in ("variance_epsilon", "eps") if name in vars(module)), "")


def _unsupported_module(module: Any, family: str) -> str | None:
    """Why a module cannot be copied by its weights alone. family: transformers' Python module of the family."""
    if (name := kernel(module)) is not None:
        return f"is quantised ({name}), and the native engine reads plain weights only"
    for weight in module._parameters.values():
        if weight is not None and weight.dtype not in TYPES:
            return f"is stored in {weight.dtype}; the native engine reads float32, bfloat16 and float16"
    place = type(module).__module__
    in_skipstone = all(one.startswith("skipstone.") for one in (place, family))
    own = in_skipstone or (place == family and place.startswith("transformers."))
    if type(module) not in TORCH_MODULES and not own and place != "transformers.activations":
        return (
            f"is a {type(module).__name__} of {place}, and the native engine knows only the modules that transformers builds "
            "this family of"
        )
    return None
