"""Whether the operators' errors are no larger than those of the FFT that they replace.

An FFT of n points errs by eps * sqrt(log2(n)) of a row's norm, wherever a sample lies. A sum of K products that are added one by one errs
by eps * sqrt(K): less for few taps, more for many. Tensor cores' sums are promoted so often that their errors stay below an FFT's.
Gradients of weights are sums of short sums in double.
"""

from __future__ import annotations

from fusebackend.patterns.causal_conv1d.fft_calls import Call
from fusebackend.patterns.causal_conv1d.operator_work import kernel_facts
from fusebackend.rewriting.device_facts import device_facts

#: Products up to which even the largest error of sums that are made one by one is below that of an FFT: on GPUs, and on CPUs, whose kernels
#: add sums of blocks of products.
MOST_ADDED, MOST_ADDED_ON_CPU = 48, 1024


def why_inaccurate(call: Call) -> str:
    """Why the call's results would not be as accurate as the FFT's; empty where they are."""
    if call.is_weight_gradient:
        return ""
    sizes = call.sizes()
    if sizes.known is None:
        return "whether its errors are below those of the FFT depends on sizes that are not known"
    if 0 in sizes.known[:4]:
        return ""
    most, products = MOST_ADDED_ON_CPU, min(sizes.taps, sizes.samples)
    if sizes.device.type == "cuda":
        facts = kernel_facts(sizes)
        on_tensor_cores = facts["tensor_cores"] and facts["shared"] <= device_facts(sizes.device).block_shared_bytes
        if on_tensor_cores or facts["doubles"] or facts["short"] or facts["window"] or facts["fft"]:
            return ""
        most = MOST_ADDED
    if products <= most:
        return ""
    return f"sums of {products} products, added one by one, have larger errors than the FFT"
