"""Describe the JSON encoding of a type: its keys, nesting and kinds of values."""

from typing import Any

from msgspec import inspect

Tree = dict[str, Any] | list[Any] | str


def key_tree(kind: Any) -> Tree:
    return _tree(inspect.type_info(kind))


def _tree(info: inspect.Type) -> Tree:
    match info:
        case inspect.StructType(fields=fields, array_like=False):
            return {field.encode_name: _tree(field.type) for field in fields}
        case inspect.StructType(fields=fields):
            return [_tree(field.type) for field in fields]
        case inspect.DictType(value_type=value):
            return {"*": _tree(value)}
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_tree(item)]
        case inspect.TupleType(item_types=items):
            return [_tree(item) for item in items]
        case inspect.UnionType(types=types):
            return _union([_tree(each) for each in types])
        case inspect.CustomType() | inspect.AnyType():
            return "any"
        case inspect.EnumType(cls=cls):
            return " or ".join(sorted(member.value for member in cls))
        case inspect.LiteralType(values=values):
            return " or ".join(sorted(map(str, values)))
        case _:
            return type(info).__name__.removesuffix("Type").lower()


def _union(trees: list[Tree]) -> Tree:
    (first, *more) = sorted(trees, key=lambda tree: isinstance(tree, str))
    if isinstance(first, str):
        return " or ".join(str(tree) for tree in trees)
    return {"one of": trees} if more != ["none"] else {"optional": first}
