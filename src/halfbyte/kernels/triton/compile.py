"""Compiles a call for an architecture that need not be here. Refuses Triton's interpreter, which compiles nothing."""

from __future__ import annotations

from typing import Any

from halfbyte.errors import PlanError
from halfbyte.kernels.triton.call import TritonCall, compile_options
from halfbyte.plan.phase import Arch


class _Driver:
    """Answers what the compiler asks of a GPU, so that `tl.target_info` sees the target and not this machine."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


def compile_call(call: TritonCall, arch: Arch) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise PlanError("TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it.")
    assert arch.capability is not None
    number = int(arch.target.removeprefix("sm_").rstrip("a"))
    target = GPUTarget("cuda", number, 32)
    fn = call.resolve()
    names: list[str] = fn.arg_names
    signature, constants, attributes = {}, {}, {}
    for at, name in enumerate(names):
        kind = call.types.get(name)
        if name in call.constants or kind is None:
            signature[name] = "constexpr"
            constants[(at,)] = call.constants.get(name)
            continue
        signature[name], _, hint = kind.partition(":")
        if hint or kind.startswith("*"):
            attributes[(at,)] = [["tt.divisibility", 16]]
    assert set(call.types) | set(call.constants) == set(names), f"{call.function}: arguments differ"
    state = vars(triton.runtime.driver)
    before = dict(state)
    triton.runtime.driver.set_active(_Driver(target))
    try:
        return triton.compile(
            ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes),
            target=target,
            options={
                "num_warps": call.warps,
                "num_stages": call.stages,
                **call.options,
                **compile_options(arch),
            },
        )
    finally:
        state.update(before)
