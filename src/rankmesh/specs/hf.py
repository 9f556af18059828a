"""config.json of Hugging Face, into a ModelSpec and out of one.

Owns the translation, and refuses by name what one side cannot express. It reads no file and knows
no torch; keys and their defaults are data of hf_dialects.py, tensor names of hf_tensors.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from rankmesh.errors import CheckpointError, ConfigError
from rankmesh.specs.hf_dialects import DIALECTS, Dialect
from rankmesh.specs.hf_rope import refuse, rope_in, rope_out
from rankmesh.specs.model import ModelSpec, make_spec

_SOFT_CAPS = ("attention_softcap", "logit_softcap")
_LAYER_TYPES = {"sliding_attention": "L", "full_attention": "G"}
# Marks of a tokenizer. Absent, they would mean ids that the classes have as defaults.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that a config.json stands for; absent keys have Hugging Face's own defaults.

    Raises CheckpointError naming the first option that a ModelSpec cannot express, ConfigError
    where the sizes do not fit each other.
    """
    family, dialect = _dialect_of(config)
    given: dict[str, Any] = {
        field: config.get(key, dialect.absent.get(key)) for field, key in dialect.keys.items()
    }
    for field in _SOFT_CAPS:
        if field in given:
            given[field] = given[field] or 0.0
    if given.get("query_scalar") == given.get("head_dim"):
        given["query_scalar"] = None
    for key, fields in dialect.biases.items():
        given |= dict.fromkeys(fields, config.get(key, False))
    given["mlp"] = _activation_in(dialect, config)
    if dialect.dropouts:
        given["dropout"] = _dropout_in(dialect, config)
    if dialect.rope_kinds:
        given |= rope_in(dialect, config, given["max_seq_len"])
    given |= _windows_in(dialect, config, given["num_layers"])
    return make_spec(family=family, **given)


def spec_to_hf(spec: ModelSpec) -> dict[str, Any]:
    """config.json of `spec`, in the form that transformers 4.53 and later read.

    Dropout of a family that has none there is left out: it does not change what the weights mean.
    Raises CheckpointError naming the first option that the architecture cannot express.
    """
    dialect = DIALECTS[spec.family]
    if dialect.whole_heads and spec.hidden_size % spec.num_heads:
        why = f"it must divide hidden_size {spec.hidden_size}"
        _cannot(spec, "num_heads", spec.num_heads, why)
    config: dict[str, Any] = {
        "architectures": [dialect.architecture],
        "model_type": dialect.model_type,
        **{key: getattr(spec, field) for field, key in dialect.keys.items()},
    }
    for field in _SOFT_CAPS:
        if field in dialect.keys:
            config[dialect.keys[field]] = getattr(spec, field) or None
    if "query_scalar" in dialect.keys:
        config[dialect.keys["query_scalar"]] = _query_scalar_out(spec)
    config |= {key: _bias_out(spec, key, fields) for key, fields in dialect.biases.items()}
    name, values = dialect.activation
    config[name] = next(value for value, mlp in values.items() if mlp == spec.mlp)
    config |= dict.fromkeys(dialect.dropouts, spec.dropout)
    config |= rope_out(dialect, spec)
    config |= _windows_out(dialect, spec)
    config |= dict.fromkeys(TOKEN_IDS)
    _check_lossless(spec, dialect, config)
    return config


def same_for_hf(spec: ModelSpec, config: Mapping[str, Any]) -> bool:
    """Whether a config.json stands for the model `spec`, apart from how it is trained."""
    dialect = DIALECTS[spec.family]
    try:
        return _meaning(spec_from_hf(config), dialect) == _meaning(spec, dialect)
    except (CheckpointError, ConfigError):
        return False


def _dialect_of(config: Mapping[str, Any]) -> tuple[str, Dialect]:
    """Family and dialect of a config, once nothing in it is beyond them."""
    kind = config.get("model_type")
    known = {dialect.model_type: family for family, dialect in DIALECTS.items()}
    if not isinstance(kind, str) or kind not in known:
        refuse("model_type", kind, known)
    dialect = DIALECTS[known[kind]]
    architectures = config.get("architectures") or [dialect.architecture]
    if dialect.architecture not in architectures:
        refuse("architectures", architectures, [dialect.architecture])
    # Code of its own that only repeats the class we know, as Phi-3's, changes nothing.
    code = (config.get("auto_map") or {}).get("AutoModelForCausalLM", "")
    plain = code.rpartition(".")[2] == dialect.architecture
    for key in ("quantization_config", "auto_map"):
        if config.get(key) is not None and not (key == "auto_map" and plain):
            raise CheckpointError(
                f"config.json: {key} is set; only plain {kind} weights can be read"
            )
    for key, allowed in dialect.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            refuse(key, config[key], allowed)
    return known[kind], dialect


def _activation_in(dialect: Dialect, config: Mapping[str, Any]) -> str:
    key, values = dialect.activation
    value = config.get(key, next(iter(values)))
    if not isinstance(value, str) or value not in values:
        refuse(key, value, values)
    return values[value]


def _dropout_in(dialect: Dialect, config: Mapping[str, Any]) -> Any:
    first, *others = dialect.dropouts
    dropout = config.get(first, dialect.absent[first])
    for key in others:
        value = config.get(key, dialect.absent[key])
        if value != dropout:
            refuse(key, value, [f"{dropout}, as {first}"])
    return dropout


def _windows_in(
    dialect: Dialect, config: Mapping[str, Any], num_layers: int
) -> dict[str, int | str]:
    types = config.get("layer_types") if dialect.windows in ("switch", "types") else None
    if types is not None:
        _check_layer_types(types, num_layers)
    window = config.get("sliding_window", dialect.absent.get("sliding_window")) or 0
    if dialect.windows == "switch" and not config.get("use_sliding_window", False):
        window = 0
    if dialect.windows == "none" or not window:
        return {"window": 0, "window_pattern": "L"}
    if dialect.windows == "all":
        return {"window": window, "window_pattern": "L"}
    if types is not None:
        pattern = "".join(_LAYER_TYPES[kind] for kind in types)
    elif dialect.windows == "switch":
        first = config.get("max_window_layers", dialect.absent["max_window_layers"])
        pattern = "".join("L" if layer >= first else "G" for layer in range(num_layers))
    else:
        every = config.get("sliding_window_pattern", dialect.absent["sliding_window_pattern"])
        pattern = "L" * (every - 1) + "G"
    return {"window": window, "window_pattern": pattern}


def _check_layer_types(types: Any, num_layers: int) -> None:
    """Also where no layer has a window: what is not understood is not passed over."""
    for kind in types:
        if kind not in _LAYER_TYPES:
            refuse("layer_types", kind, _LAYER_TYPES)
    if len(types) != num_layers:
        refuse("layer_types", f"a list of {len(types)}", [f"a list of {num_layers}"])


def _windows_out(dialect: Dialect, spec: ModelSpec) -> dict[str, Any]:
    windows = spec.windows
    if dialect.windows == "none":
        return {}
    if dialect.windows == "all":
        if len(set(windows)) > 1:
            why = "all of its layers have the same window"
            _cannot(spec, "window_pattern", spec.window_pattern, why)
        return {"sliding_window": windows[0] or None}
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    if dialect.windows == "types":
        # It wants a number also where no layer uses it.
        window = spec.window or dialect.absent["sliding_window"]
        return {"sliding_window": window, "layer_types": types}
    local = [layer for layer, window in enumerate(windows) if window]
    return {
        "use_sliding_window": bool(local),
        "sliding_window": spec.window if local else None,
        "max_window_layers": local[0] if local else spec.num_layers,
        "layer_types": types,
    }


def _bias_out(spec: ModelSpec, key: str, fields: tuple[str, ...]) -> bool:
    """One switch there for several here, which must agree."""
    on = [field for field in fields if getattr(spec, field)]
    off = [field for field in fields if field not in on]
    if on and off:
        # Without one is the default: the one that is on was asked for.
        _cannot(spec, on[0], True, f"its {key} would set model.{off[0]} too, which is False")
    return bool(on)


def _query_scalar_out(spec: ModelSpec) -> int:
    """Typed as an integer there."""
    scalar = spec.query_scalar or spec.head_dim
    if scalar != int(scalar):
        _cannot(spec, "query_scalar", scalar, "it must be a whole number")
    return int(scalar)


def _check_lossless(spec: ModelSpec, dialect: Dialect, config: Mapping[str, Any]) -> None:
    """What is written must be read as the same model: that catches every option at once."""
    try:
        back = _meaning(spec_from_hf(config), dialect)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"the model cannot be written as {dialect.architecture}: {error}"
        ) from error
    for field, value in _meaning(spec, dialect).items():
        if back[field] != value:
            _cannot(spec, field, value, f"it would be read as {back[field]!r}")


def _meaning(spec: ModelSpec, dialect: Dialect) -> dict[str, Any]:
    """Fields by what they amount to, without those that only tell how to train."""
    fields = spec.to_dict() | {
        "window": spec.windows,
        "query_scalar": spec.query_scalar or spec.head_dim,
    }
    unused = {"window_pattern", "scale_residual_init"}
    if not dialect.dropouts:
        unused.add("dropout")
    return {name: value for name, value in fields.items() if name not in unused}


def _cannot(spec: ModelSpec, field: str, value: object, why: str) -> NoReturn:
    architecture = DIALECTS[spec.family].architecture
    raise CheckpointError(f"model.{field} {value!r} cannot be written as {architecture}: {why}")
