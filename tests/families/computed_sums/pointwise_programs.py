"""Programs, and calls of the operators, that tests of kernels share."""

import torch

from fusebackend.patterns.computed_sums import ops, program
from fusebackend.patterns.computed_sums.ops import letters

f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16

#: dy, x, mean, scale, weight, bias: both sums of batch norm's backward behind SiLU.
SILU = (
    "t0=sub(i1,i2);t1=mul(i3,i4);t2=mul(t0,t1);t3=add(t2,i5);t4=sigmoid(t3);t5=sub(1.0,t4);t6=mul(t3,t5);t7=add(1.0,t6);t8=mul(t4,t7);"
    "t9=mul(i0,t8);out(t9);t10=mul(t9,t0);out(t10)"
)
#: x, mean, scale, weight, bias: what squeeze and excitation takes means of, and dy, ...: the sums that are the gradient of its gate.
SQUEEZED = "t0=sub(i0,i1);t1=mul(i2,i3);t2=mul(t0,t1);t3=add(t2,i4);t4=sigmoid(t3);t5=mul(t3,t4);out(t5)"
GATE = "t0=sub(i1,i2);t1=mul(i3,i4);t2=mul(t0,t1);t3=add(t2,i5);t4=sigmoid(t3);t5=mul(t3,t4);t6=mul(i0,t5);out(t6)"
#: dy, y, x, mean: the same as `SILU` behind ReLU.
RELU = "t0=le(i1,0.0);t1=where(t0,0.0,i0);out(t1);t2=sub(i2,i3);t3=mul(t1,t2);out(t3)"
GELU = "t0=mul(i0,0.7071067811865476);t1=erf(t0);t2=add(t1,1.0);t3=mul(i0,0.5);t4=mul(t3,t2);t5=mul(t4,i1);out(t5)"
PRODUCT = "t0=mul(i0,i1);out(t0)"
SELF = "out(i0)"


def types(dtypes):
    return "".join("d" if dtype is f64 else letters([dtype]) for dtype in dtypes)  # which is refused


def computed_sums(inputs, text, dtypes, batch_dims=0, means=False):
    return ops.computed_sums(inputs, text, types(dtypes), batch_dims, means)


def computed_rows(inputs, text, dtypes):
    return ops.computed_rows(inputs, text, types(dtypes))


EVERY_NAME = {
    name: f"t0={name}({','.join(f'i{k}' for k in range(count))});" + ("out(t0)" if name not in ("lt", "le", "gt", "ge", "eq", "ne") else "")
    for name, (count, _) in program.FUNCTIONS.items()
}
EVERY_NAME |= {
    name: text + "t1=where(t0,i0,0.0);out(t1)" for name, text in EVERY_NAME.items() if name in ("lt", "le", "gt", "ge", "eq", "ne")
}
EVERY_NAME |= {
    "and": "t0=gt(i0,0.0);t1=and(i1,t0);t2=where(t1,i0,1e-05);out(t2)",
    "or": "t0=gt(i0,inf);t1=or(t0,i1);t2=where(t1,i0,-1.5);out(t2)",
    "not": "t0=not(i1);t1=where(t0,i0,nan);out(t1)",
    "where": "t0=where(i1,i0,-inf);out(t0)",
}


def types_of(name):
    if name in ("and", "or", "not", "where"):
        return [f32, torch.bool]
    return [f32, bf16][: program.FUNCTIONS[name][0]]
