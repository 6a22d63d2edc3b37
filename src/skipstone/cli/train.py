"""`skipstone train layerskip RECIPE`: a training run from one file. `skipstone train heads MODEL`: light heads for a model."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import typer

from skipstone.cli.option_groups import DEVICE, DTYPES, expect_folder, expect_model
from skipstone.cli.options import AS_JSON, OptionGroup, argument, option, takes_groups

train = typer.Typer(help="Train what a method needs.", no_args_is_help=True)
SHAPES, PRESETS = ("1B", "8B", "70B"), ("quick", "paper")  # those of skipstone.train, which would import torch
PACKAGES = ("accelerate", "jinja2", "yaml", "tqdm")

OUTPUT = option(None, "Folder of the run, instead of the recipe's.")
DATA_DIR = option(None, "Folder with JSON lines for the data sets of the hub that the recipe names.")


@dataclass(frozen=True)
class EstimateOptions(OptionGroup, panel="Before a run"):
    """An estimate instead of a run."""

    dry_run: bool = option(False, "Say what memory and time each GPU would take, and start nothing.")
    gpus: int | None = option(None, "GPUs that share the model. Default: 1.")
    size: str | None = option(None, "Llama 3's, instead of the recipe's model.", "--shape", choices=SHAPES)
    mfu: float | None = option(None, "Share of the GPU's peak that training reaches. Default: 0.4.")
    peak_tflops: float | None = option(None, "That peak. Default: 989, an H100's in bfloat16.")


@train.command("layerskip")
@takes_groups
def layerskip(
    recipe: Path = argument("The recipe, a YAML file (see recipes/)."),
    output: Path | None = OUTPUT,
    data_dir: Path | None = DATA_DIR,
    fresh: bool = option(False, "Refuse to resume: the folder must be empty."),
    seed: int | None = option(None, "Instead of the recipe's. Give each seed an --output.", min=0),
    *,
    estimate: EstimateOptions,
    as_json: bool = AS_JSON,
) -> None:
    """Train with layer dropout and early exits; an interrupted run resumes where it stopped."""
    _check_inputs([recipe], data_dir, "no such recipe", is_recipe=True)
    given = {name: value for name, value in asdict(estimate).items() if name != "dry_run" and value is not None}
    if estimate.dry_run:
        from skipstone.train.layerskip import estimate as estimating
        from skipstone.train.layerskip.arguments import arguments, read

        settings = read(recipe, data_dir)
        cost = estimating.estimate(settings, recipe.parent, arguments(settings, Path(settings.output)), **given)
        typer.echo(json.dumps(cost.to_json()) if as_json else "\n".join(estimating.format_estimate(cost)))
        return
    if given or as_json:
        raise ValueError("--gpus, --shape, --mfu, --peak-tflops and --json are about --dry-run: give it, too")
    from skipstone.train.layerskip.run import run

    try:
        folder = run(recipe, output, fresh, data_dir, seed, say=partial(typer.echo, err=True))
    except ImportError as error:  # an optional package of a setting: peft, or what an optimiser needs
        raise ValueError(str(error)) from error
    typer.echo(str(folder))


@train.command("heads")
@takes_groups
def heads(
    model: str | None = argument("A folder or a hub id. Default: the recipe's, else the bundled model.", None),
    recipe: Path | None = option(None, "A recipe, a YAML file (see recipes/)."),
    prompts: list[Path] | None = option(None, 'JSON lines with a "prompt", instead of a recipe; several times.'),
    output: Path | None = OUTPUT,
    preset: str | None = option(None, "paper is 100 epochs in batches of 128.", choices=PRESETS),
    max_disk: float = option(20.0, "Most GiB of stored states.", min=0),
    data_dir: Path | None = DATA_DIR,
    dtype: str | None = option(None, "Default: the model's.", choices=DTYPES),
    device: str = DEVICE,
    fresh: bool = option(False, "Refuse to go on with an earlier run: the folder must be empty."),
) -> None:
    """Train AdaDecode's exit heads on the model's own answers; an interrupted run goes on where it stopped."""
    if (recipe is None) == (not prompts):
        raise ValueError("give either --recipe or --prompts: the texts whose answers the heads learn from")
    if recipe is None and output is None:
        raise ValueError("--prompts needs --output, the folder of the run")
    _check_inputs([recipe] if recipe else prompts or [], data_dir, "no such file", is_recipe=recipe is not None)
    expect_model(model)
    from skipstone.train.heads.answers import GIB
    from skipstone.train.heads.recipe import of_prompts, read
    from skipstone.train.heads.training import run

    here = str(Path(model).absolute()) if model and Path(model).is_dir() else model
    given = {name: value for name, value in {"model": here, "model_dtype": dtype}.items() if value is not None}
    file = None if recipe is None else read(recipe, preset, data_dir, **given)
    settings = file or of_prompts(prompts or [], output, preset, **given)
    base, say = Path.cwd() if recipe is None else recipe.parent, partial(typer.echo, err=True)
    typer.echo(str(run(settings, base, output, max_disk=max_disk * GIB, device=device, fresh=fresh, say=say)))


def _check_inputs(files: list[Path], data_dir: Path | None, missing: str, is_recipe: bool) -> None:
    """FileNotFoundError for a missing file; ValueError for a recipe that is no YAML and for packages that
    training needs."""
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(2, missing, str(file))
        if is_recipe:
            from skipstone.utils.yaml_files import mapping

            mapping(file)
    expect_folder(data_dir)
    if absent := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f'training needs more packages ({", ".join(absent)}): pip install "skipstone[train]"')
