"""Whether a JSON schema has a finite value.

A schema such as {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]} has none: every value needs a
further one. A grammar of it allows a text that never ends.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

SCALAR, ARRAY, OBJECT = "scalar", "array", "object"
KINDS = frozenset({SCALAR, ARRAY, OBJECT})
"""Kinds of JSON values. Scalars are always finite."""


class _Part(NamedTuple):
    """A subschema for values of some kinds. resource: the schema with an $id around it, or the root."""

    schema: Any
    kinds: frozenset[str]
    resource: Any

    @property
    def key(self) -> tuple[int, frozenset[str]]:
        return id(self.schema), self.kinds


def has_finite_value(schema: dict[str, Any]) -> bool:
    """False only if no finite value can fulfil the schema. A reference that cannot be resolved counts as fulfilled."""
    named, root = _named_schemas(schema), _Part(schema, KINDS, schema)
    num_missing, users, rest = dict[Any, int](), defaultdict[Any, list[list[Any]]](list), [root]
    while rest:
        part = rest.pop()
        if part.key not in num_missing:
            required = list(_required(part, named))
            num_missing[part.key] = len(required)
            for alternatives in required:
                user = [part.key]  # empty once one of the alternatives is fulfilled
                for one in alternatives:
                    users[one.key].append(user)
                rest += alternatives
    fulfilled = [key for key, count in num_missing.items() if not count]
    for key in fulfilled:  # grows while it is read
        for user in filter(None, users[key]):
            num_missing[user[0]] -= 1
            if not num_missing[user[0]]:
                fulfilled.append(user[0])
            user.clear()
    return not num_missing[root.key]


def _required(part: _Part, named: dict[str, Any]) -> Iterator[list[_Part]]:
    """What a subschema requires: of every list that is yielded, one part must be fulfilled."""
    schema, kinds, resource = part
    if schema is False:
        yield []
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$id"), str):
        resource = schema
    both = [one for one in _get(schema, "allOf", list) if isinstance(one, dict)]
    for one in (schema, *both):
        kinds &= _kinds(one.get("type"))
    if (target := _target(schema.get("$ref"), resource, named)) is not None:
        both.append(target)
    yield from ([_Part(one, kinds, resource)] for one in both)
    for key in schema.keys() & {"anyOf", "oneOf"}:
        yield [_Part(one, kinds, resource) for one in _get(schema, key, list)]
    if "const" in schema or "enum" in schema or SCALAR in kinds:
        return
    if len(kinds) != 1:
        yield [_Part(schema, frozenset({kind}), resource) for kind in kinds]
        return
    for alternatives in _items(schema) if ARRAY in kinds else _properties(schema):
        yield [_Part(one, KINDS, resource) for one in alternatives]


def _items(schema: dict[str, Any]) -> list[list[Any]]:
    """The items that an array must have."""
    count, items = _get(schema, "minItems", int), schema.get("items", True)
    first = items if isinstance(items, list) else _get(schema, "prefixItems", list)
    others = schema.get("additionalItems", True) if isinstance(items, list) else items
    return [[one] for one in (*first[:count], *([others] if count > len(first) else []))]


def _properties(schema: dict[str, Any]) -> list[list[Any]]:
    """The properties that an object must have."""
    properties, patterns = _get(schema, "properties", dict), _get(schema, "patternProperties", dict)
    others = schema.get("additionalProperties", True)
    required = [name for name in _get(schema, "required", list) if isinstance(name, str)]
    parts = [[properties.get(name, True if patterns else others)] for name in required]
    if _get(schema, "minProperties", int):
        parts.append([*properties.values(), *patterns.values(), others])
    return parts


def _target(reference: Any, resource: Any, named: dict[str, Any]) -> Any:
    """The schema that a $ref names; None for none, and for one that is not found."""
    if not isinstance(reference, str):
        return None
    if not reference.startswith("#/"):
        return resource if reference == "#" else named.get(reference)
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
