"""AdamW on host memory: one compiled pass over state, gradient and weight, and a plain path.

The compiled pass is a small C file built on first use with the machine's own compiler (no torch headers: a
second, not a minute) and cached by source, flags and processor. It reads bf16 gradients and writes bf16 weights
in the pass of the update. Where no compiler works, torch's fused CPU AdamW does the update between two
conversions.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from operators.adamw_math import Hyper, fused_adamw
from operators.errors import RuleError

HostKernel = Literal["auto", "native", "plain"]
_SOURCE = Path(__file__).parent / "kernels" / "host_adamw.c"
# No contraction: the source says itself which products are fused, in torch's order.
_FLAGS = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp"]
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class HostUpdate(Protocol):
    """One AdamW step on one slice of host memory.

    Args:
        master, exp_avg, exp_avg_sq: ``[n]`` fp32, changed in place.
        grad: ``[n]`` bf16 or fp32.
        weight: ``[n]`` bf16 or fp32, receives the rounded master.
        step: count of this step, from 1.
        scale: factor on the gradient, 1.0 for none.
        threads: CPU threads of the compiled pass; torch's kernel keeps torch's own.
    """

    def __call__(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        weight: Tensor,
        *,
        hyper: Hyper,
        step: int,
        scale: float,
        threads: int,
    ) -> None: ...


class PlainUpdate:
    """:class:`HostUpdate` by ``torch._fused_adamw_``: the bits of ``torch.optim.AdamW(fused=True)`` on the CPU.

    Keeps one fp32 gradient of the largest slice it has seen, so that a step touches no fresh memory.
    """

    def __init__(self) -> None:
        self._workspace = torch.empty(0)

    def __call__(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        weight: Tensor,
        *,
        hyper: Hyper,
        step: int,
        scale: float,
        threads: int,
    ) -> None:
        del threads
        if grad.dtype != torch.float32 or scale != 1.0:
            if self._workspace.numel() < grad.numel():
                self._workspace = torch.empty(grad.numel())
            widened = self._workspace[: grad.numel()]
            grad = widened.copy_(grad)
            if scale != 1.0:
                grad.mul_(scale)
        fused_adamw(
            hyper,
            masters=[master],
            grads=[grad],
            exp_avgs=[exp_avg],
            exp_avg_sqs=[exp_avg_sq],
            steps=[torch.tensor(float(step))],
        )
        weight.copy_(master)


class _Scalars(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("scale", "decay", "lerp", "beta2", "square", "step_size", "bias2_sqrt", "eps")
    ]


class NativeUpdate:
    """:class:`HostUpdate` by the compiled pass.

    Attributes:
        past_caches: store weights past the CPU's caches, which never read them (x86).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.past_caches = True

    def __call__(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        weight: Tensor,
        *,
        hyper: Hyper,
        step: int,
        scale: float,
        threads: int,
    ) -> None:
        if isinstance(master, FakeTensor):
            raise RuleError(
                rule="the compiled host pass needs real memory",
                value="fake tensors",
                remedy="Dry-run engine='stream' or 'device'; the host engine holds no device memory.",
            )
        scalars = _Scalars(
            scale=scale,
            decay=1 - hyper.lr * hyper.weight_decay,
            lerp=1 - hyper.beta1,
            beta2=hyper.beta2,
            square=1 - hyper.beta2,
            step_size=hyper.lr / (1 - hyper.beta1**step),
            bias2_sqrt=math.sqrt(1 - hyper.beta2**step),
            eps=hyper.eps,
        )
        # The call releases the interpreter, so the thread that launches a stream goes on.
        self._library[f"adamw_{_NAMES[grad.dtype]}_{_NAMES[weight.dtype]}"](
            *(ctypes.c_void_p(t.data_ptr()) for t in (master, exp_avg, exp_avg_sq, grad, weight)),
            ctypes.c_int64(master.numel()),
            ctypes.byref(scalars),
            ctypes.c_int(threads),
            ctypes.c_int(self.past_caches),
        )


def host_update(kernel: HostKernel = "auto") -> HostUpdate:
    """An update for one thread: ``native`` is the compiled pass, ``plain`` torch's, ``auto`` the first that works.

    Raises:
        RuleError: ``native`` was asked for and cannot be built.
    """
    if kernel == "plain":
        return PlainUpdate()
    try:
        return NativeUpdate(load_library())
    except (OSError, subprocess.SubprocessError) as error:
        if kernel == "auto":
            return PlainUpdate()
        detail = getattr(error, "stderr", None) or str(error)
        raise RuleError(
            rule="the native host AdamW needs a C compiler with OpenMP",
            value=detail,
            remedy="Install gcc or clang (CC names another), or choose host_kernel='plain'.",
        ) from error


@cache
def load_library() -> ctypes.CDLL:
    """The compiled pass, built once a machine and loaded once a process."""
    return ctypes.CDLL(str(_build()))


def _cache_folder() -> Path:
    set_by_user = os.environ.get("FLATPEAK_CACHE")
    if set_by_user:
        return Path(set_by_user)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatpeak"


def _processor() -> str:
    """What ``-march=native`` depends on: a home may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _build() -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler on the path")
    flags = list(_FLAGS)
    if (native := _NATIVE.get(platform.machine())) is not None:
        flags.append(native)
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([source, " ".join([compiler, *flags]).encode(), _processor().encode()]))
    folder = _cache_folder()
    library = folder / f"host_adamw_{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        built = Path(work) / library.name
        subprocess.run(
            [compiler, *flags, "-shared", "-fPIC", str(_SOURCE), "-o", str(built), "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        built.replace(library)  # whole or not at all, also when several ranks build at once
    return library
