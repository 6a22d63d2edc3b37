"""Whether a JSON schema has a finite value.

A schema such as {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]} has none: every value needs a
further one. A grammar of it allows a text that never ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

SCALAR, ARRAY, OBJECT = "scalar", "array", "object"
KINDS = frozenset({SCALAR, ARRAY, OBJECT})
"""Kinds of JSON values. Scalars are always finite."""


def has_finite_value(schema: dict[str, Any]) -> bool:
    """False only if no finite value can fulfil the schema. A reference that cannot be resolved counts as fulfilled."""
    return _AndOrGraph(schema).is_fulfilled()


@dataclass(eq=False, slots=True)
class _Node:
    """A part of a schema. missing: number of its parts that are not fulfilled yet. users: nodes with this one as a part."""

    missing: int = 0
    users: "list[_Node]" = field(default_factory=list)


class _AndOrGraph:
    """The subschemas of a schema as an AND-OR graph. A node is fulfilled if its parts are, in a finite number of steps."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._named = _named_schemas(schema)
        self._nodes: dict[tuple[int, frozenset[str]], _Node] = {}
        self._pending: list[tuple[_Node, Any, frozenset[str], Any]] = []
        self._fulfilled: list[_Node] = []
        self._root = self._node(schema, KINDS, schema)

    def is_fulfilled(self) -> bool:
        """Whether the whole schema is fulfilled."""
        while self._pending:
            node, *subschema = self._pending.pop()
            self._require_all(node, self._parts(*subschema))
        while self._fulfilled:
            for user in self._fulfilled.pop().users:
                user.missing -= 1
                if user.missing == 0:
                    self._fulfilled.append(user)
        return self._root.missing <= 0

    def _node(self, schema: Any, kinds: frozenset[str], resource: Any) -> _Node:
        """The node of a subschema for values of some kinds. resource: the schema with an $id around it, or the root."""
        key = id(schema), kinds
        if key not in self._nodes:
            self._nodes[key] = _Node(missing=1)
            self._pending.append((self._nodes[key], schema, kinds, resource))
        return self._nodes[key]

    def _require_all(self, node: _Node, parts: Sequence[_Node]) -> _Node:
        """Make a node fulfilled if all parts are."""
        node.missing = len(parts)
        for part in parts:
            part.users.append(node)
        if not parts:
            self._fulfilled.append(node)
        return node

    def _any_of(self, parts: Iterable[_Node]) -> _Node:
        """A node that is fulfilled if one of its parts is."""
        node = _Node(missing=1)
        for part in parts:
            part.users.append(node)
        return node

    def _parts(self, schema: Any, kinds: frozenset[str], resource: Any) -> list[_Node]:
        """The nodes that a subschema requires."""
        if not isinstance(schema, dict):
            return [_Node(missing=1)] if schema is False else []
        if isinstance(schema.get("$id"), str):
            resource = schema
        both = [one for one in _get(schema, "allOf", list) if isinstance(one, dict)]
        for one in (schema, *both):
            kinds &= _kinds(one.get("type"))
        parts = [self._node(one, kinds, resource) for one in both]
        if (target := self._target(schema.get("$ref"), resource)) is not None:
            parts.append(self._node(target, kinds, resource))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                parts.append(self._any_of(self._node(one, kinds, resource) for one in _get(schema, key, list)))
        if "const" not in schema and "enum" not in schema and SCALAR not in kinds:
            inner = {ARRAY: self._items, OBJECT: self._properties}
            parts.append(self._any_of(self._require_all(_Node(), inner[kind](schema, resource)) for kind in sorted(kinds)))
        return parts

    def _items(self, schema: dict[str, Any], resource: Any) -> list[_Node]:
        """The items that an array must have."""
        count, items = _get(schema, "minItems", int), schema.get("items", True)
        first = items if isinstance(items, list) else _get(schema, "prefixItems", list)
        others = schema.get("additionalItems", True) if isinstance(items, list) else items
        needed = [*first[:count], *([others] if count > len(first) else [])]
        return [self._node(one, KINDS, resource) for one in needed]

    def _properties(self, schema: dict[str, Any], resource: Any) -> list[_Node]:
        """The properties that an object must have."""
        named, patterns = _get(schema, "properties", dict), _get(schema, "patternProperties", dict)
        others = schema.get("additionalProperties", True)
        required = [name for name in _get(schema, "required", list) if isinstance(name, str)]
        unknown = True if patterns else others
        parts = [self._node(named.get(name, unknown), KINDS, resource) for name in required]
        if _get(schema, "minProperties", int):
            every = [*named.values(), *patterns.values(), others]
            parts.append(self._any_of(self._node(one, KINDS, resource) for one in every))
        return parts

    def _target(self, reference: Any, resource: Any) -> Any:
        """The schema that a $ref names; None for none, and for one that is not found."""
        if not isinstance(reference, str):
            return None
        if not reference.startswith("#/"):
            return resource if reference == "#" else self._named.get(reference)
        for part in unquote(reference[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                resource = resource[int(name) if isinstance(resource, list) and name.isdecimal() else name]
            except (LookupError, TypeError):
                return None
        return resource


def _named_schemas(schema: Any) -> dict[str, Any]:
    """Every subschema with an $anchor or an $id, by the $ref that names it."""
    found, rest = dict[str, Any](), [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            for key, prefix in (("$anchor", "#"), ("$id", "")):
                if isinstance(name := one.get(key), str):
                    found[prefix + name] = one
        rest += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return found


def _kinds(types: Any) -> frozenset[str]:
    """The kinds of values of a schema's `type`."""
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list):
        return KINDS
    return frozenset(name if name in (ARRAY, OBJECT) else SCALAR for name in names if isinstance(name, str))


def _get(schema: dict[str, Any], key: str, kind: type[Any]) -> Any:
    """A value of a schema; an empty one, or 0, if it is of another kind."""
    value = schema.get(key)
    return value if isinstance(value, kind) else kind()
