"""What may be computed anew in backward, and the refusals of what may not.

Owns the names and their rules. It knows no plan, no layer and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankmesh.errors import PlanError

MODES = ("none", "selective", "full")
# Name of a module -> those inside it.
MODULES = {
    "core": (),
    "norm": (),
    "activation": (),
    "attention": ("core",),
    "mlp": ("activation",),
}
NAMES = tuple(MODULES)
CORE = ("core",)


def stretches(mode: str, modules: Sequence[str]) -> frozenset[str]:
    """Names of the stretches of a layer that are computed anew; a whole layer is a "block"."""
    if mode == "selective":
        return frozenset(modules)
    return frozenset({"block"} if mode == "full" else ())


def check_recompute(
    mode: str, layers: Sequence[int] | None, modules: Sequence[str], num_chunks: int
) -> None:
    """Raises PlanError, in one line, where the keys mean nothing or do not fit each other."""
    _check_modules(mode, modules)
    if layers is None:
        return
    if mode == "none":
        raise PlanError(
            f"recompute_layers {list(layers)} with recompute none: allowed with selective and full"
        )
    if len(layers) not in (1, num_chunks):
        raise PlanError(
            f"recompute_layers {list(layers)}: needed is one number, or one for each of the "
            f"{num_chunks} chunk(s) of a rank"
        )
    for count in layers:
        if type(count) is not int or count < 0:
            raise PlanError(
                f"recompute_layers {list(layers)}: {count!r} is no whole number of at least 0"
            )


def _check_modules(mode: str, modules: Sequence[str]) -> None:
    if mode != "selective" and tuple(modules) != CORE:
        raise PlanError(
            f"recompute_modules {', '.join(map(str, modules))} with recompute {mode}: allowed with "
            "selective"
        )
    if not modules or len(set(modules)) < len(modules) or not set(modules) <= set(MODULES):
        raise PlanError(
            f"recompute_modules {list(modules)}: allowed are {', '.join(MODULES)}, each once, and "
            "at least one"
        )
    for outer in modules:
        for inner in MODULES[outer]:
            if inner in modules:
                raise PlanError(
                    f"recompute_modules {', '.join(modules)}: {outer} holds {inner}; name one of "
                    "them"
                )
