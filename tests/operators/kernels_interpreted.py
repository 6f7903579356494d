"""Run in a process of its own with TRITON_INTERPRET=1: the Triton kernels against their torch path, on a CPU.

Prints one line per disagreement and ends with their number as exit status.
"""

from __future__ import annotations

import sys

import torch

from operators.kernels import route, route_triton, swiglu, swiglu_triton
from operators.kernels.swiglu import GPT_OSS, SWIGLU, Gate


def main() -> int:
    wrong = []
    generator = torch.Generator().manual_seed(0)

    def near(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
        got, want = got.float(), want.float()
        difference = float(((got - want).abs() / (1 + want.abs())).max())
        if not difference <= tolerance:
            wrong.append(f"{name}: {difference}")

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for columns in (8, 100, 768):
            source = torch.randn(9, columns, generator=generator).to(dtype)
            index = torch.tensor([8, 0, 3, 3, 7], dtype=torch.int32)
            out = torch.empty(5, columns, dtype=dtype)
            route_triton.gather(source, index, out)
            near(f"gather {columns} {dtype}", out, route.gather_rows(source, index), 0.0)
            positions = torch.randint(0, 9, (12, 3), generator=generator, dtype=torch.int32)[::2]
            weights = torch.rand(12, 3, generator=generator)[::2]
            for given in (None, weights):
                got, want = (torch.zeros(12, columns, dtype=dtype) for _ in range(2))
                route_triton.combine(source, positions, given, got[1::2])
                route.combine_rows(source, positions, given, want[1::2])
                near(f"combine {columns} {dtype} {given is None}", got, want, tolerance)
        for gate in (SWIGLU, GPT_OSS, Gate(1.702, 0.5, interleaved=True)):
            values = (torch.randn(7, 2 * 20, generator=generator) * 3).to(dtype)
            upstream = torch.randn(7, 20, generator=generator).to(dtype)
            row_weights = torch.rand(7, generator=generator)
            h = torch.empty(7, 20, dtype=dtype)
            swiglu_triton.forward(gate, values, h)
            near(f"gate {gate} {dtype}", h, swiglu.gated(gate, values), tolerance)
            v, u, dots = values.clone(), upstream.clone(), torch.empty(7)
            swiglu_triton.backward(gate, v, u, row_weights, dots)
            want_dots = swiglu.gated_backward_(gate, values, upstream, row_weights)
            near(f"gate gradient {gate} {dtype}", v, values, tolerance)
            near(f"weighted h {gate} {dtype}", u, upstream, tolerance)
            near(f"row dots {gate} {dtype}", dots, want_dots, tolerance)
    print("\n".join(wrong))
    return min(len(wrong), 100)


if __name__ == "__main__":
    sys.exit(main())
