"""Values of `defaults` that the option --set gives in place of those in the matrix file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shardlab.errors import InputError
from shardlab.files.document import Document, parse_document
from shardlab.matrix.study import Deviation

SET_REASON = "given by --set"  # the reason of a deviation that --set makes
# Keys that replace each other: a cell has one of both.
REPLACING_KEYS = (("gpu_batch_size", "global_batch_size"), ("steps", "epochs"))


def override_defaults(document: Document, settings: Sequence[str]) -> None:
    """Change `defaults` in the content of a matrix file, and add each change to its `deviations`.

    settings: the values of --set, each as KEY=VALUE with a value in YAML. The keys and values are checked later, with those of
    the file; a problem then names the option. Raises InputError if a setting is not KEY=VALUE, or if a key is set twice.
    """
    value_by_key: dict[str, Any] = {}
    for setting in settings:
        key, _, value_text = (part.strip() for part in setting.partition("="))
        if not key or not value_text:
            raise InputError(f"--set: found {setting!r}. Allowed: KEY=VALUE, such as steps=100.")
        if key in value_by_key:
            raise InputError(f"--set: the key {key} is set twice. Allowed: one value for each key.")
        value_by_key[key] = parse_document(value_text.encode(errors="surrogateescape"), f"--set {setting}").data
        document.option_by_path["defaults", key] = f"--set {setting}"
    content = document.data if isinstance(document.data, dict) else {}
    defaults, deviations = content.setdefault("defaults", {}), content.setdefault("deviations", []) if settings else []
    if not isinstance(defaults, dict) or not isinstance(deviations, list):
        return  # the check of the file reports it
    for key, value in value_by_key.items():
        partners = [other for key_pair in REPLACING_KEYS for other in key_pair if key in key_pair and other not in value_by_key]
        replaced_keys = [old for old in defaults if old in partners or old.startswith(f"{key}.")]
        for replaced_key in replaced_keys:
            deviations.append(_make_deviation(replaced_key, defaults.pop(replaced_key), None))
        deviations.append(_make_deviation(key, defaults.get(key), value))
        defaults[key] = value


def _make_deviation(key: str, earlier_value: Any, new_value: Any) -> dict[str, Any]:
    return {"key": key, "study": earlier_value, "here": new_value, "why": SET_REASON}


def list_settings(deviations: Iterable[Deviation]) -> list[str]:
    """The values of --set that made these deviations, as KEY=VALUE, without the keys that another one replaced."""
    value_by_key = {change.key: change.here for change in deviations if change.why == SET_REASON}
    replaced_keys = {old for pair in REPLACING_KEYS if value_by_key.keys() >= {*pair} for old in pair}
    replaced_keys |= {key for key in value_by_key for new in value_by_key if key.startswith(f"{new}.")}
    return [
        f"{key}={msgspec.json.encode(value).decode()}"
        for key, value in value_by_key.items()
        if value is not None or key not in replaced_keys
    ]
