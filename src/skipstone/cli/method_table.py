"""The names of methods and of their settings, read from the source of the classes, which take seconds to import.

The command line refuses a misspelt name by this table before torch is imported. A test compares it with the classes.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

from skipstone.decoding.method_text import Known, MethodNames
from skipstone.decoding.settings import LAYERS, METHODS

PACKAGE = Path(__file__).parents[1]
SHARED = (PACKAGE / "decoding" / "method.py", PACKAGE / "decoding" / "settings.py")  # bases and types of all methods
WORDS = {"int": ["int"], "float": ["float"], "str": ["text"], "bool": ["true", "false"]}  # as in `Setting.type`


class MethodSource:
    """The classes of methods in a folder, as syntax trees. types: names that stand for a type, such as Threshold."""

    def __init__(self, folder: Path) -> None:
        paths = [*SHARED, *sorted(folder.rglob("*.py"))]
        statements = [one for path in paths for one in ast.parse(path.read_text(encoding="utf-8")).body]
        self.classes = {one.name: one for one in statements if isinstance(one, ast.ClassDef)}
        self.types = {ast.unparse(one.targets[0]): one.value for one in statements if isinstance(one, ast.Assign)}

    def words_of(self, annotation: ast.AST) -> list[str]:
        """A type in a user's words."""
        match annotation:
            case ast.BinOp(left=left, right=right):
                return self.words_of(left) + self.words_of(right)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
                return [str(one.value) for one in ast.walk(choices) if isinstance(one, ast.Constant)]
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[ast.Name(id=member), *_])):
                return [LAYERS if member == "int" else METHODS]
            case ast.Constant(value=None):
                return ["none"]
            case ast.Name(id=name):
                return self.words_of(self.types[name]) if name in self.types else WORDS.get(name, [])
        return []

    def names_of(self, kind: ast.ClassDef) -> MethodNames:
        """What a class declares and inherits. A class that defines `lossless` may change the text."""
        fields = {ast.unparse(one.target): one for one in kind.body if isinstance(one, ast.AnnAssign)}
        own = {name: one.annotation for name, one in fields.items() if "ClassVar" not in ast.unparse(one.annotation)}
        settings, aliases = {name: "|".join(self.words_of(one)) for name, one in own.items()}, {}
        for base in (name for name in map(ast.unparse, kind.bases) if name in self.classes):
            inherited = self.names_of(self.classes[base])
            settings, aliases = {**inherited.settings, **settings}, {**inherited.aliases}
        for part in ast.walk(fields["aliases"]) if "aliases" in fields else ():
            aliases |= ast.literal_eval(part) if isinstance(part, ast.Dict) else {}
        match fields.get("presets"):
            case ast.AnnAssign(value=ast.Dict(keys=[_, *_] as names)):
                settings["preset"] = "|".join(ast.literal_eval(name) for name in names if name is not None)
        return MethodNames(settings, aliases, not any(getattr(one, "name", "") == "lossless" for one in kind.body))


@cache
def read_names(folder: Path) -> Known:
    """Name of a method or peer -> what its text may say, of all classes in a folder that have a name."""
    source, found = MethodSource(folder), {}
    for kind in source.classes.values():
        for one in kind.body:
            match one:
                case ast.AnnAssign(target=ast.Name(id="name"), annotation=ast.Subscript(), value=ast.Constant(value=str(name))):
                    found[name] = source.names_of(kind)
    return found


def known_peers() -> Known:
    """What only `skipstone bench` compares with."""
    return read_names(PACKAGE / "lab" / "bench" / "peers")


def known_methods() -> Known:
    """All methods in the registry's order. If the classes are imported already, they are read instead."""
    if "skipstone.methods" in sys.modules:
        from skipstone import methods

        return methods.known()
    registry = (PACKAGE / "methods" / "__init__.py").read_text(encoding="utf-8")
    names = read_names(PACKAGE / "methods")
    return {name: names[name] for name in re.findall(r'"(\w+)": [A-Z]\w*,', registry)}
