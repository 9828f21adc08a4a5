def slabs(self, arrays: List[Tensor], start: List[int], length: List[int]) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    for i in range(len(arrays)):
        out.append(arrays[i].reshape([-1]).narrow(0, start[i], length[i]))
    return out

def parts(self, bucket: Tensor, offset: List[int], length: List[int]) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    for i in range(len(offset)):
        out.append(bucket.narrow(0, offset[i], length[i]))
    return out

def update(self, weights: List[Tensor], gradients: List[Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, start: List[int], offset: List[int], length: List[int], step: List[int], lr: float, beta1: float, beta2: float, epsilon: float, decay: float, limit: float, divisor: float) -> int:
    w = self.slabs(weights, start, length)
    g = self.slabs(gradients, start, length)
    m = self.parts(exp_avg, offset, length)
    v = self.parts(exp_avg_sq, offset, length)
    if limit > 0.0:
        for i in range(len(g)):
            g[i].clamp_(-limit, limit)
    self.adamw(w, g, m, v, step, lr, beta1, beta2, epsilon, decay, divisor)
    return 0

def sum_of_squares(self, gradient: Tensor, limit: float, chunk: int) -> float:
    flat = gradient.reshape([-1])
    n = flat.numel()
    total = 0.0
    for i in range((n + chunk - 1) // chunk):
        x = flat.narrow(0, i * chunk, min(chunk, n - i * chunk)).to(dtype=7)
        if limit > 0.0:
            x.clamp_(-limit, limit)
        total = total + float(torch.dot(x, x))
    return total

def is_zero(self, x: Tensor) -> bool:
    return not bool(torch.any(x))

def zero(self, arrays: List[Tensor]) -> int:
    for i in range(len(arrays)):
        arrays[i].zero_()
    return 0

def copy(self, target: Tensor, target_start: int, source: Tensor, source_start: int, length: int) -> int:
    target.view([-1]).narrow(0, target_start, length).copy_(source.reshape([-1]).narrow(0, source_start, length))
    return 0
