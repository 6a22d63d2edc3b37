"""What a decoding method is: a frozen dataclass of hyper-parameters that creates drafters.

The loop knows methods only through this file, `Session` and `Drafter`.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers import PreTrainedModel

from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.session import Session
from skipstone.decoding.settings import setting, settings_of, spell_value
from skipstone.engines.model_runner import ModelRunner
from skipstone.utils.files import digest


class _AcceptsAliases(type):
    """The class of methods' classes: a method can be made by the aliases of its fields too."""

    if not TYPE_CHECKING:  # type checkers know the fields only

        def __call__(cls, *args, **settings):
            if cls.aliases.keys() & settings.keys():
                cls.warn_of_aliases(settings, stacklevel=3)
                positional = [field.name for field in fields(cls) if not field.kw_only]
                args, settings = (), cls.renamed(dict(zip(positional, args, strict=False)) | settings)
            return super().__call__(*args, **settings)


@dataclass(frozen=True)
class Method(metaclass=_AcceptsAliases):
    """Base of all methods. Fields of subclasses are the paper's hyper-parameters with the paper's defaults.

    name: how users call it. aliases: older names of fields and other packages' names, accepted with a warning.
    if_few_accepted: what it means for this method that hardly any draft is accepted. by_model: fields whose default is the
    model's own; None leaves them to it. of_methods: fields that hold other methods. positional: what it does, as the rest of a
    sentence, that states without positions do not allow.
    """

    name: ClassVar[str]
    aliases: ClassVar[dict[str, str]] = {}
    if_few_accepted: ClassVar[str] = ""
    by_model: ClassVar[tuple[str, ...]] = ()
    of_methods: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[str] = ""

    @classmethod
    def warn_of_aliases(cls, given: Iterable[str], stacklevel: int) -> None:
        """Warn of every name that is an alias. stacklevel: as in `warnings.warn`, seen from here."""
        for key in given:
            if key in cls.aliases:
                warnings.warn(f"{key} is called {cls.aliases[key]} in skipstone", FutureWarning, stacklevel=stacklevel)

    @classmethod
    def renamed(cls, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """Settings from several sources by their fields' names. A later source overrides an earlier one.

        ValueError for a source that gives one field under two names.
        """
        found: dict[str, Any] = {}
        for source in sources:
            own: dict[str, Any] = {}
            for key, value in source.items():
                name = cls.aliases.get(key, key)
                if name in own:
                    raise ValueError(f"{name} is given twice")
                own[name] = value
            found |= own
        return found

    def takes_predictions(self, model: ModelRunner) -> bool:
        """Whether it drafts from what a request predicts."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether the text (or its law) is the target's own."""
        return True

    @property
    def spelled(self) -> str:
        """The text that `skipstone.methods.resolve` reads as this method. A draft model that was given as an object is called
        by its name."""
        return " ".join([self.name, *(f"{name}={spell_value(value)}" for name, value in self.settings.items())])

    @property
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters by name, as plain JSON values: a model that was given as an object is called what it is."""
        values = {name: getattr(self, name) for name in settings_of(type(self))}
        for name in self.of_methods:
            values[name] = None if values[name] is None else ";".join(one.spelled for one in values[name])
        for name, one in values.items():
            if not isinstance(one, (str, int, float, bool, tuple, list, dict, type(None))):
                values[name] = str(one) if isinstance(one, Path) else getattr(one, "name_or_path", "") or type(one).__name__
        return values

    def completed(self, default: Any) -> Self:
        """This method with the fields that it leaves to the model, from a model's default (`generation_config.skipstone`)."""
        if not isinstance(default, Mapping) or default.get("method") != self.name:
            return self
        left = {name: default[name] for name in self.by_model if getattr(self, name) is None and name in default}
        return replace(self, **left)

    def check(self, model: ModelRunner) -> None:
        """Raise ValueError where the settings are impossible or do not fit the model. Called before any work. Types and ranges
        are checked here, by the fields; a subclass adds what else there is to say."""
        for name, one in settings_of(type(self)).items():
            one.check(getattr(self, name))
        self.check_states(model)

    @classmethod
    def check_states(cls, model: ModelRunner) -> None:
        """ValueError where a model keeps states without positions and the method needs positions."""
        if cls.positional and model.family.recurrent:
            raise ValueError(
                f"{cls.name} {cls.positional}, which the recurrent states of a {model.config.model_type} model do not allow: "
                "they go along one chain; autoregressive, layerskip, prompt_lookup and speculative decode it"
            )

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        """What the method has learnt about a model across requests, as plain JSON values; empty where it learns nothing."""
        return {}

    @property
    def target_depth(self) -> int | None:
        """Layers of the target that count; None for all of them."""
        return None

    @property
    def accepts_all_drafts(self) -> bool:
        """Whether every draft token is kept, whatever the target says of it."""
        return False

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        """What drafts for a session of `rows` rows of at most `capacity` tokens each."""
        raise NotImplementedError

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """How it drafts for `auto`: drafters by name. By default as a whole, by its own schedule. Drafts that it would draw at
        random are coupled to the target's noise."""
        is_drawn = hasattr(self, "rejection_sample_method")
        method = replace(self, rejection_sample_method="coupled") if is_drawn else self  # type: ignore[call-arg]
        return {self.name: Candidate(method.create_drafter(model, rows, capacity), lambda: digest(method.spelled))}

    def start(self, model: ModelRunner, rows: int, capacity: int) -> Session:
        """A session for `rows` rows of at most `capacity` tokens each."""
        drafter = self.create_drafter(model, rows, capacity)
        return Session(model, rows, capacity, drafter, depth=self.target_depth, accepts_all=self.accepts_all_drafts)


@dataclass(frozen=True, kw_only=True)
class DraftingMethod(Method):
    """Base of the methods that draft and can leave that alone. They draft at every step, as their papers say; `auto` decides
    where that pays, among several of them or, with `guard`, for one."""

    guard: bool = setting(False, "never slower than plain decoding: `auto` with this method alone.", kw_only=True)

    @property
    def unguarded(self) -> Self:
        """The method itself."""
        return replace(self, guard=False) if self.guard else self
