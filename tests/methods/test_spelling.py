"""Text and JSON name a method, also with older names of settings, for which one warning tells the present name."""

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone import METHODS, AdaSD, Auto, Autoregressive, LayerSkip, Recycle, SelfSpeculative, Speculative
from skipstone.decoding.method import Method
from skipstone.decoding.method_text import parse
from skipstone.decoding.settings import LAYERS, Setting, parse_value, settings_of
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.lab.bench.run_file import RunFile
from skipstone.methods import MethodMissing, known, resolve, spell
from skipstone.serving.request_parser import RequestParser
from tests.helpers.commandline import succeed

RENAMED: list[tuple[str, str, str, Any]] = [
    ("self_speculative", "stop_threshold", "confidence_threshold", 0.4),
    ("adadecode", "threshold", "confidence_threshold", 0.3),
    ("adadecode", "max_pending", "num_speculative_tokens", 3),
    ("adasd", "max_window", "num_speculative_tokens", 7),
    ("adasd", "fixed_window", "num_speculative_tokens", 3),
    ("jacobi", "block", "num_speculative_tokens", 5),
    ("recycle", "nodes", "num_speculative_tokens", 6),
    ("recycle", "candidates", "num_candidates", 3),
    ("swift", "enough", "target_matchness", 0.9),
    ("auto", "remembers", "use_profile", False),
]
"""(method, older name, present name, a value that is not the default)."""
NEEDED: dict[str, dict[str, Any]] = {"self_speculative": {"draft_quantize": "int4"}, "fixed_window": {"adaptive_length": False}}
"""What a method, or a setting, is given besides."""


@pytest.fixture(scope="module")
def loaded() -> Any:
    return skipstone.load(None, engine="native")


@contextmanager
def one_warning(old: str, new: str) -> Iterator[None]:
    """Inside, one FutureWarning tells the present name of a setting; where the two are the same there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(one.message) for one in caught if one.category is FutureWarning]
    assert found == ([] if old == new else [f"{old} is called {new} in skipstone"])


def text_of(name: str, settings: dict[str, Any]) -> str:
    return " ".join([name, *(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items())])


def of_the_model(loaded: Any, name: str, settings: dict[str, Any]) -> Method:
    config = loaded[0].generation_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "skipstone", {"method": name, **settings})
        return resolve_for(loaded[0], None)


def of_a_body(loaded: Any, name: str, settings: dict[str, Any]) -> Method:
    model, tokenizer = loaded
    return RequestParser(ModelRunner(model), tokenizer, Autoregressive(), 64).parse_method({"method": name, **settings})


WAYS: dict[str, Callable[[Any, str, dict[str, Any]], Method]] = {
    "keywords": lambda _, name, settings: METHODS[name](**settings),
    "a text": lambda _, name, settings: resolve(text_of(name, settings)),
    "a mapping": lambda _, name, settings: resolve({"method": name, **settings}),
    "JSON": lambda _, name, settings: resolve(json.dumps({"method": name, **settings})),
    "generation_config": of_the_model,
    "a body": of_a_body,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "old", "new", "value"), RENAMED)
def test_an_older_name_gives_an_equal_method(way: str, name: str, old: str, new: str, value: Any, loaded: Any) -> None:
    more = NEEDED.get(name, {}) | NEEDED.get(old, {})
    expected = METHODS[name](**more, **{new: value})
    for key in (old, new):
        with one_warning(key, new):
            found = WAYS[way](loaded, name, {**more, key: value})
        assert (replace(found, own=None) if isinstance(found, Auto) else found) == expected, "the bundled model has a method"


def test_the_command_line_warns_once() -> None:
    arguments = ("--prompt", "x", "--max-new-tokens", 2, "--engine", "native", "--json", "--method", "recycle nodes=6")
    found = succeed("generate", *arguments)
    assert json.loads(found.stdout)["method"]["num_speculative_tokens"] == 6
    warning = "skipstone: warning: nodes is called num_speculative_tokens in skipstone"
    assert found.stderr.count("is called") == found.stderr.count(warning) == 1


def test_of_two_names_for_one_setting_neither_wins_and_a_candidate_has_older_names_too() -> None:
    for make in (lambda: Recycle(nodes=5, num_speculative_tokens=5), lambda: Recycle(5, nodes=5)):  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="num_speculative_tokens is given twice"), pytest.warns(FutureWarning):
            make()
    with one_warning("nodes", "num_speculative_tokens"):
        assert resolve('auto candidates="recycle nodes=5"') == Auto((Recycle(5),))


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name, kind in METHODS.items() for preset in kind.presets])
def test_a_preset_is_its_settings_and_what_is_given_next_to_it_wins(name: str, preset: str) -> None:
    kind: Any = METHODS[name]
    settings = kind.presets[preset].settings
    expected = kind(**settings)
    for found in (kind(preset=preset), resolve(f"{name} preset={preset}"), resolve({"method": name, "preset": preset})):
        assert found == expected
    for key in settings:
        other = another_value(settings_of(kind)[key])
        assert resolve({"method": name, "preset": preset, key: other}) == replace(expected, **{key: other})
    assert resolve(f"{name} preset={preset}", {"method": name, **kind().settings}) == expected, "not the model's own setting"


def test_an_older_name_next_to_a_preset_and_a_preset_that_there_is_not() -> None:
    with one_warning("num_assistant_tokens", "num_speculative_tokens"):
        assert resolve("layerskip preset=paper exit_layer=2 num_assistant_tokens=3") == LayerSkip(2, 3)
    with pytest.raises(ValueError, match=r"preset takes paper.*, found 'author'"):
        resolve("layerskip preset=author")
    with pytest.raises(ValueError, match="layerskip has no preset 'author'; there are paper"):
        LayerSkip(preset="author")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="recycle has no setting 'preset'"):
        resolve("recycle preset=paper")


ABSENT = object()


@pytest.mark.filterwarnings("ignore:.* is called:FutureWarning")
def test_adasd_has_the_window_that_its_older_settings_meant() -> None:
    """Whichever of them the model's own method says, and whichever the call."""
    values = {"adaptive_length": (ABSENT, True, False), "max_window": (ABSENT, 9), "fixed_window": (ABSENT, 3)}
    for asked, own in itertools.product(itertools.product(*values.values()), repeat=2):
        given, default = (
            {key: value for key, value in zip(values, one, strict=True) if value is not ABSENT} for one in (asked, own)
        )
        meant = {"adaptive_length": True, "max_window": 20, "fixed_window": 5, **default, **given}
        method: Any = resolve({"method": "adasd", **given}, {"method": "adasd", **default})
        assert method.window == (meant["max_window"] if meant["adaptive_length"] else meant["fixed_window"])
        assert method == AdaSD(**{**default, **given})


def test_a_run_that_was_begun_with_older_names_goes_on(tmp_path: Path) -> None:
    changes = (("nodes", [4, 6]), ("num_speculative_tokens", [4, 6]), ("num_speculative_tokens", [4, 7]))
    same = {"method": "layerskip", "label": "l", "preset": ["paper"]}
    plans = [{"methods": [{"method": "recycle", "label": "r", key: value}, same]} for key, value in changes]
    with RunFile(tmp_path / "run.jsonl", plans[0], {}) as journal:
        journal.add({"kind": "trial"})
    with RunFile(tmp_path / "run.jsonl", plans[1], {}) as journal:
        assert [line["kind"] for line in journal.lines] == ["run", "trial", "resumed"]
    with pytest.raises(ValueError, match="holds another run: methods differ"):
        RunFile(tmp_path / "run.jsonl", plans[2], {})


@pytest.mark.parametrize("name", METHODS)
def test_what_is_spelled_is_read_as_the_same_method(name: str) -> None:
    kind = METHODS[name]
    assert resolve(spell(kind())) == kind()
    assert resolve(json.dumps({"method": name, **kind().settings})) == kind()
    for setting in settings_of(kind).values():
        changed = dataclasses.replace(kind(), **{setting.name: another_value(setting)})
        assert resolve(spell(changed)) == changed, spell(changed)


def another_value(setting: Setting) -> Any:
    """A value that is no default."""
    first, *_, last = setting.type.split("|") * 2
    values = {"text": "a b", "float": 0.25, "int": 3, "true": False}
    return values[first] if first in values else (1, 2) if last == LAYERS else parse_value("", last, last)


ANOTHER_NAME = pytest.mark.filterwarnings("ignore:num_assistant_tokens is called num_speculative_tokens:FutureWarning")


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("layerskip", LayerSkip()),
        ("  layerskip   exit-layer=4 confidence_threshold=NONE reuse_cache=off ", LayerSkip(4, reuse_cache=False)),
        ("self_speculative skip_attention=1,2 skip_mlp=[3]", SelfSpeculative((1, 2), (3,))),
        ("self_speculative profile='my sets/a=b.json'", SelfSpeculative(profile="my sets/a=b.json")),
        (r"speculative draft_model=C:\models\small#1", Speculative(r"C:\models\small#1")),
        (' {"method": "layerskip", "exit_layer": 4}', LayerSkip(4)),
        pytest.param("layerskip num_assistant_tokens=3", LayerSkip(num_speculative_tokens=3), marks=ANOTHER_NAME),
    ],
)
def test_texts(text: str, method: Any) -> None:
    assert resolve(text) == method


def test_a_text_fills_in_the_models_own_method_and_one_without_a_name_changes_it() -> None:
    own = "layerskip exit_layer=3 num_speculative_tokens=9"
    assert resolve(None, own) == LayerSkip(3, 9)
    assert resolve("layerskip exit_layer=2", own) == LayerSkip(2, 9)
    assert resolve("exit_layer=2", own) == LayerSkip(2, 9)
    assert resolve("early_exit exit_layer=2", own).settings == {"exit_layer": 2}
    with pytest.raises(ValueError, match="num_speculative_tokens takes int, found 'few'"):
        resolve("layerskip num_assistant_tokens=few")
    with pytest.raises(MethodMissing, match="'exit_layer=2' names no method; there are auto, autoregressive"):
        resolve("exit_layer=2")


def test_several_values_are_a_list_but_a_list_is_one_value() -> None:
    read = {"method": "layerskip", "exit_layer": [3, 6], "label": "1"}
    assert parse("layerskip exit_layer=3,6 label=1", known(), None, labels=("label",), several=True) == read
    assert parse("adadecode exit_layers=3,6", known(), None, several=True)["exit_layers"] == [3, 6]
    with pytest.raises(ValueError, match=r"exit_layer takes int\|none, found '3,6'"):
        parse("layerskip exit_layer=3,6", known(), None)
