"""Whether the gradient of a sink is right, measured by the terms that it is the sum of.

    dsink[head] = sum over rows of p * (dLSE - sum over columns of dO * out)      p = exp(sink - LSE)

The terms p * dLSE and p * dO * out have both signs and may leave next to nothing of each other, so an error relative to
dsink itself has no bound. There are two others:

1. From the out and LSE that the op was given, dsink is a sum in fp32. Its error is at most `FP32_UNIT` of the sum of
   the absolute terms.
2. From q, k and v, there are the errors of LSE and of out as well.
   - An error of LSE is a relative one of p: `LSE_ERROR` of the sum over rows of p * |dLSE - sum of dO * out|.
   - Out comes of three roundings to its dtype: of P before it meets V, of P V, and of this with its share beside the
     sink. One of x errs by at most u * |x|, with the unit roundoff u and |x| not below the smallest normal number;
     if it errs by anything up to this with equal chance, its standard deviation is u * |x| / sqrt(3). The last two
     are of out itself. The first moves a row's sum of dO * out by an error of P * dP for each key, and for values of
     random signs the sum of (P * dP)**2 over keys is in the mean that of (dO * out)**2 over columns. Variances of
     independent errors add up, so with these three equal ones

         standard deviation of dsink = u * sqrt(sum of (p * dO * out)**2)

     of which `DEVIATIONS` are allowed. Where values repeat, errors do, and all of one sign they come to at most
     3 * u * (sum of |p * dO * out|).
"""

import math

import torch

FP32_UNIT = 2e-6
LSE_ERROR = 1e-4  # of a kernel's approximate exponentials and logarithms
NUM_ROUNDINGS = 3
DEVIATIONS = 5  # 0.64 in root mean square, 2.7 at most in 6,400 sums with rounded P, out and share


def check_sink_gradient(dsink, ref, dout, out, lse, sink, dlse=None, *, independent=True):
    """Checks dsink against the sum in fp64 of the terms that the op was given, and against `ref`.

    Args:
        dsink: (num_heads,), fp32.
        ref: (num_heads,), fp64, from q, k and v.
        dout, out: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim).
        lse, dlse: (batch, num_heads, seqlen_q), or (num_heads, total_q); dlse may be None. Where LSE is -inf, the rows
            of all four are not read.
        sink: (num_heads,).
        independent: False where values repeat, so that errors of out may all have one sign.

    Raises:
        AssertionError: with the errors and the allowed ones.
    """
    is_row, info = lse != -math.inf, torch.finfo(out.dtype)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    # (batch, num_heads, seqlen_q), and with a head_dim
    p = torch.where(is_row, torch.exp(sink.double()[:, None] - lse.double()), 0.0)
    dlse = torch.where(is_row, dlse.double(), 0.0)
    dout, out = (torch.where(is_row[..., None], x.double().transpose(-2, -3), 0.0) for x in (dout, out))
    products, rounded = dout * out, dout.abs() * out.abs().clamp_min(info.tiny)
    rows = dlse - products.sum(-1)

    def add_up(rows):
        return (p * rows).sum(-1).view(-1, len(sink)).sum(0)

    in_fp32 = FP32_UNIT * add_up(dlse.abs() + products.abs().sum(-1))
    if independent:
        of_out = DEVIATIONS * add_up(p * rounded.square().sum(-1)).sqrt()
    else:
        of_out = NUM_ROUNDINGS * add_up(rounded.sum(-1))
    of_forward = LSE_ERROR * add_up(rows.abs()) + info.eps / 2 * of_out
    for source, wanted, allowed in (
        ("out and LSE", add_up(rows), in_fp32),
        ("q, k and v", ref, in_fp32 + of_forward),
    ):
        error = (dsink.double() - wanted).abs()
        assert (error <= allowed).all(), (
            f"dsink from {source}: errors {error.tolist()} of {wanted.tolist()}, allowed {allowed.tolist()}"
        )
