"""A decoding method: a frozen dataclass of hyper-parameters that creates drafters.

The loop knows methods only through this file, `Session` and `Drafter`.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method_states import method_report
from skipstone.decoding.session import Session
from skipstone.decoding.settings import setting, settings_of, spell_value
from skipstone.engines.model_runner import ModelRunner
from skipstone.utils.files import digest
from skipstone.utils.setup_times import setup_work

PRESET = "preset"
"""Key that names a preset among a method's settings."""


@dataclass(frozen=True)
class Preset:
    """Settings as a source has them. source: the source with section or version, and what it leaves open."""

    source: str
    settings: Mapping[str, Any]


class _AcceptsAliases(type):
    """Metaclass of methods: its constructor accepts aliases of fields, and the name of a preset."""

    if not TYPE_CHECKING:  # type checkers must see the fields only

        def __call__(cls, *args, **settings):
            if settings.keys() & {PRESET, *cls.aliases}:
                cls.warn_of_aliases(settings, stacklevel=3)
                positional = [field.name for field in fields(cls) if not field.kw_only]
                args, settings = (), cls.renamed(dict(zip(positional, args, strict=False)) | settings)
            return super().__call__(*args, **settings)


@dataclass(frozen=True)
class Method(metaclass=_AcceptsAliases):
    """Base class of all methods. Fields of subclasses are the paper's hyper-parameters with the paper's defaults.

    name: the user's name for it. aliases: older or other packages' names of fields, accepted with a warning. presets: settings
    of a paper or of released code by name; `preset=NAME` sets them, and settings next to it win. if_few_accepted: the likely
    cause of a low acceptance rate, as a sentence. by_model: fields that default to the model's own value if they are
    None. of_methods: fields that hold other methods. positional: if the method needs positions, what for (the end of a
    sentence); recurrent models refuse it.
    """

    name: ClassVar[str]
    aliases: ClassVar[dict[str, str]] = {}
    presets: ClassVar[dict[str, Preset]] = {}
    if_few_accepted: ClassVar[str] = ""
    by_model: ClassVar[tuple[str, ...]] = ()
    of_methods: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[str] = ""

    @classmethod
    def warn_of_aliases(cls, given: Iterable[str], stacklevel: int) -> None:
        """Warn of every alias. stacklevel: as in `warnings.warn`, counted from here."""
        for key in given:
            if key in cls.aliases:
                warnings.warn(f"{key} is called {cls.aliases[key]} in skipstone", FutureWarning, stacklevel=stacklevel)

    @classmethod
    def renamed(cls, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """Settings from several sources by field name, without aliases and presets. Later sources override earlier ones.

        ValueError for a source with two names of one field, and for an unknown preset.
        """
        merged: dict[str, Any] = {}
        for source in cls.with_presets(*sources):
            renamed: dict[str, Any] = {}
            for key, value in source.items():
                name = cls.aliases.get(key, key)
                if name in renamed:
                    raise ValueError(f"{name} is given twice")
                renamed[name] = value
            merged |= renamed
        return merged

    @classmethod
    def with_presets(cls, *sources: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The sources, each after the settings of the preset that it names. ValueError for an unknown preset."""
        for source in sources:
            if PRESET in source:
                name, source = source[PRESET], {key: value for key, value in source.items() if key != PRESET}
                if not isinstance(name, str) or name not in cls.presets:
                    raise ValueError(f"{cls.name} has no preset {name!r}; there are {', '.join(cls.presets) or 'none'}")
                yield cls.presets[name].settings
            yield source

    def takes_predictions(self, model: ModelRunner) -> bool:
        """Whether it drafts from a request's prediction."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether texts, or their distribution, are the target's own."""
        return True

    @property
    def spelled(self) -> str:
        """The text that `skipstone.methods.resolve` reads as this method. It names a draft model given as an object."""
        return " ".join([self.name, *(f"{name}={spell_value(value)}" for name, value in self.settings.items())])

    @property
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters by name, as plain JSON values. A model given as an object becomes its name."""
        values = {name: getattr(self, name) for name in settings_of(type(self))}
        for name in self.of_methods:
            values[name] = None if values[name] is None else ";".join(method.spelled for method in values[name])
        for name, value in values.items():
            if not isinstance(value, (str, int, float, bool, tuple, list, dict, type(None))):
                is_path = isinstance(value, Path)
                values[name] = str(value) if is_path else getattr(value, "name_or_path", "") or type(value).__name__
        return values

    def completed(self, default: Any) -> Self:
        """This method with its open fields (`by_model`) filled from a model's default (`generation_config.skipstone`)."""
        if not isinstance(default, Mapping) or default.get("method") != self.name:
            return self
        missing = {name: default[name] for name in self.by_model if getattr(self, name) is None and name in default}
        return replace(self, **missing)

    def check(self, model: ModelRunner) -> None:
        """ValueError for settings that are invalid or do not fit the model. Called before any work.

        This checks types and ranges of the fields. Subclasses add their own checks."""
        for name, field in settings_of(type(self)).items():
            field.check(getattr(self, name))
        self.check_states(model)

    @classmethod
    def check_states(cls, model: ModelRunner) -> None:
        """ValueError if the method needs positions and the model has recurrent states."""
        if cls.positional and model.family.recurrent:
            raise ValueError(
                f"{cls.name} {cls.positional}, which the recurrent states of a {model.config.model_type} model do not allow: "
                "they follow one chain; autoregressive, layerskip, prompt_lookup, speculative, eagle3 and mtp decode it"
            )

    def prepare_in_background(self, model: ModelRunner) -> None:
        """Begin work that makes later requests faster, in a process that waits for requests. It delays none."""

    def save_learned(self, model: ModelRunner) -> None:
        """Save what it has learnt about a model for later processes. Any error is logged by the caller."""

    def notes(self, model: ModelRunner) -> list[str]:
        """Sentences for a user about how it ran on a model."""
        return []

    def report(self, model: Any) -> dict[str, Any]:
        """What the method has learnt about a model across requests, as plain JSON values; empty if it learns nothing."""
        return method_report(self, None, model)

    @property
    def unguarded(self) -> Self:
        """This method without `guard`."""
        return self

    @property
    def target_depth(self) -> int | None:
        """Number of target layers to run; None for all."""
        return None

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        """A drafter for a session of `rows` rows of at most `capacity` tokens each."""
        raise NotImplementedError

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """Its drafters for `auto`, by name. By default one with the method's own schedule.

        Drafts that are usually drawn at random are coupled to the target's noise."""
        is_drawn = hasattr(self, "rejection_sample_method")
        method = replace(self, rejection_sample_method="coupled") if is_drawn else self  # type: ignore[call-arg]
        return {self.name: Candidate(method.create_drafter(model, rows, capacity), lambda: digest(method.spelled))}

    def start(self, model: ModelRunner, rows: int, capacity: int) -> Session:
        """A session for `rows` rows of at most `capacity` tokens each."""
        with setup_work("drafters"):
            return Session(model, rows, capacity, self.create_drafter(model, rows, capacity), depth=self.target_depth)


@dataclass(frozen=True, kw_only=True)
class DraftingMethod(Method):
    """Base class of methods that draft. They draft at every step, as in their papers. With `guard`, `auto` decides when."""

    guard: bool = setting(False, "never slower than plain decoding: `auto` with this method alone.", kw_only=True)

    @property
    def unguarded(self) -> Self:
        return replace(self, guard=False) if self.guard else self
