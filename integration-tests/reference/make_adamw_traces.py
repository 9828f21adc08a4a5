"""Writes traces of torch.optim.AdamW that the optimizer's tests are compared with.

    pip install "torch==2.13.0+cpu"
    python3 make_adamw_traces.py ../../djl-moe-memory/src/test/resources/org/djlmoe/optimizer/adamw_traces.json

Weights and gradients are not stored: both sides compute them from integers, exactly.
"""

import json
import sys

import torch

# path -> shape, in order
SHAPES = {
    "body.weight": [3, 4],
    "body.bias": [4],
    "late.weight": [2, 3],
    "head.weight": [2, 2],
    "head.bias": [3],
}
RECORDED = [1, 10, 50]

# group: path prefix -> (learning-rate multiplier, decay, decayed whatever the rank)
CASES = [
    dict(name="no decay", lr=0.01, decay=0.0),
    dict(name="decay", lr=0.01, decay=0.1),
    dict(name="large epsilon", lr=0.01, decay=0.1, epsilon=1e-3),
    dict(name="tiny gradients", lr=0.01, decay=0.0, scale=1e-9),
    dict(name="tiny gradients, large epsilon", lr=0.01, decay=0.1, epsilon=1e-3, scale=1e-9),
    dict(name="late start", lr=0.01, decay=0.1, late=4),
    dict(name="two groups", lr=0.01, decay=0.1, group="head.", multiplier=0.1, group_decay=0.5),
    dict(name="clipped by norm", lr=0.01, decay=0.1, clip_norm=0.5),
    dict(name="hardly clipped", lr=0.01, decay=0.1, clip_norm=3.3),
    dict(name="huge gradients, clipped", lr=0.01, decay=0.1, scale=1e6, clip_norm=1.0),
    dict(name="clipped by value", lr=0.01, decay=0.1, clip_value=0.25),
    dict(name="other betas", lr=0.002, decay=0.05, beta1=0.8, beta2=0.95),
]


def number(step, parameter, element):
    """An integer in [-32768, 32767], different for every argument."""
    x = (step * 7919 + parameter * 104729 + element * 1299709 + 12345) % 2147483648
    x = (x * 1103515245 + 12345) % 2147483648
    return x // 32768 - 32768


def values(step, parameter, shape, offset, factor):
    n = torch.Size(shape).numel()
    x = [offset + number(step, parameter, i) / 32768.0 * factor for i in range(n)]
    return torch.tensor(x, dtype=torch.float64).to(torch.float32).reshape(shape)


def trace(case):
    names = list(SHAPES)
    params = {
        n: torch.nn.Parameter(values(0, i, SHAPES[n], 2.0, 1.0)) for i, n in enumerate(names)
    }
    groups = []
    for n, p in params.items():
        if case.get("group") and n.startswith(case["group"]):
            lr, decay = case["lr"] * case["multiplier"], case["group_decay"]
        else:
            lr, decay = case["lr"], case["decay"] if p.dim() > 1 else 0.0
        groups.append(dict(params=[p], lr=lr, weight_decay=decay))
    optimizer = torch.optim.AdamW(
        groups,
        betas=(case.get("beta1", 0.9), case.get("beta2", 0.999)),
        eps=case.get("epsilon", 1e-8),
    )
    steps = []
    for step in range(1, RECORDED[-1] + 1):
        for i, n in enumerate(names):
            late = n.startswith("late.") and step < case.get("late", 1)
            params[n].grad = (
                None if late else values(step, i, SHAPES[n], 0.0, case.get("scale", 1.0))
            )
        norm = None
        if "clip_value" in case:
            torch.nn.utils.clip_grad_value_(params.values(), case["clip_value"])
        if "clip_norm" in case:
            norm = torch.nn.utils.clip_grad_norm_(params.values(), case["clip_norm"]).item()
        optimizer.step()
        if step in RECORDED:
            record = dict(step=step, weights={}, exp_avg={}, exp_avg_sq={}, count={})
            if norm is not None:
                record["norm"] = norm
            for n, p in params.items():
                state = optimizer.state.get(p, {})
                record["weights"][n] = flat(p)
                if state:
                    record["exp_avg"][n] = flat(state["exp_avg"])
                    record["exp_avg_sq"][n] = flat(state["exp_avg_sq"])
                    record["count"][n] = int(state["step"])
            steps.append(record)
    return dict(case, steps=steps)


def flat(x):
    return [float(f"{v:.9g}") for v in x.detach().reshape(-1).tolist()]


if __name__ == "__main__":
    with open(sys.argv[1], "w") as out:
        json.dump(
            dict(torch=torch.__version__, shapes=SHAPES, cases=[trace(c) for c in CASES]),
            out,
            separators=(",", ":"),
        )
        out.write("\n")
