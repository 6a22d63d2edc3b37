"""Which method decodes: --method and --speculative-config, checked before torch is imported as far as that is possible."""

import json
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from skipstone.cli.method_table import known_methods
from skipstone.cli.model_options import expect_model
from skipstone.cli.options import OptionGroup, option
from skipstone.decoding import method_text
from skipstone.decoding.method_text import Known, MethodMissing


@dataclass(frozen=True)
class MethodOptions(OptionGroup, panel="Method"):
    """A method as text, as JSON, or both."""

    method: str | None = option(None, '"layerskip exit_layer=4", or JSON (`skipstone methods`). Default: the model\'s own.')
    speculative_config: str | None = option(
        None, 'As in vLLM: {"method": "layerskip", "exit_layer": 4}. It must not contradict --method.'
    )

    def parse(self) -> Any:
        """The method as `skipstone.generate` takes it. ValueError for names and types that are wrong for any model."""
        known = known_methods()
        if self.speculative_config is None:
            if self.method is not None:
                check_method_text(self.method, known)
            return self.method
        merged = _merge(self.method, self.speculative_config, known)
        with suppress(MethodMissing):
            method_text.check_names(merged, known)
        return merged

    def parse_for(self, model: str | None) -> Any:
        """As `parse`. The model must exist, and values that are wrong for any model are ValueErrors. It imports torch."""
        method = self.parse()
        expect_model(model)
        check_method_values(method)
        return method


def check_method_text(text: str, known: Known, labels: tuple[str, ...] = (), several: bool = False) -> None:
    """ValueError if a method's text has names or types that are wrong for any model."""
    with suppress(MethodMissing):  # the model's own may be meant
        method_text.check_names(method_text.parse(text, known, None, labels, several), known, labels)


def check_method_values(method: Any) -> None:
    """ValueError for values of settings that are wrong for any model. It imports torch."""
    if method is None:
        return
    from skipstone.methods import resolve

    with warnings.catch_warnings(), suppress(MethodMissing):
        warnings.simplefilter("ignore")  # it is resolved again with the model's own method, and warns then
        resolve(method)


def _merge(text: str | None, config: str, known: Known) -> dict[str, Any]:
    """--speculative-config and --method together. ValueError if they contradict each other."""
    try:
        merged = json.loads(config)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON ({error}), found {config!r}") from None
    if not isinstance(merged, dict):
        raise ValueError(f'--speculative-config must be an object such as {{"method": "layerskip"}}, found {config!r}')
    own = merged.get("method")
    settings = {} if text is None else method_text.parse(text, known, own if isinstance(own, str) and own in known else None)
    for key, value in settings.items():
        if merged.setdefault(key, value) != value:
            name = "" if key == "method" else f"{key}="
            raise ValueError(f"--method says {name}{value!r}, --speculative-config says {merged[key]!r}: give one of them")
    return merged
