"""Maps a GGUF file of an architecture that the native engine runs."""

from pathlib import Path

from skipstone.models.generation_config import GenerationFields
from skipstone.models.gguf.architectures import MODEL_TYPES, config_values, tensor_sources
from skipstone.models.gguf.reader import SUFFIX, GgufError, GgufFile
from skipstone.models.gguf.tokenizer import stop_ids
from skipstone.models.gguf.weights import GgufWeights
from skipstone.models.mapped_config import MappedConfig, UnmappableError
from skipstone.models.mapped_model import MappedModel


def gguf_path(name: str | Path) -> Path | None:
    """The path of a GGUF file; None for another name."""
    path = Path(name).expanduser()
    return path if path.suffix == SUFFIX and path.is_file() else None


def map_gguf(path: Path) -> tuple[MappedModel, GgufFile]:
    """The model in a file, and the file. UnmappableError for an architecture that the native engine does not run.

    GgufError for a damaged file, and for one that says more of its architecture than is known here: transformers would ignore
    that, and write another text."""
    file = GgufFile(path)
    if file.architecture not in MODEL_TYPES:
        raise UnmappableError(f"has the architecture {file.architecture!r}, which the native engine does not run")
    try:
        config = MappedConfig(config_values(file))
        config.name_or_path = str(path)
        fields = GenerationFields.of_config(config.to_dict() | {"eos_token_id": stop_ids(file.metadata) or None})
        return MappedModel(config, GgufWeights(file, tensor_sources(file, config)), fields), file
    except UnmappableError as error:
        raise GgufError(f"the GGUF file {path} {error}: load the model's safetensors") from error
