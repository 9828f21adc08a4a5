# A weight that is no single run of memory is refused: what is written to a copy would be lost.
def place(self, weight: Tensor, start: int, length: int) -> Tensor:
    return weight.view([-1]).narrow(0, start, length)

# The state of a bucket of n elements: exp_avg, exp_avg_sq and, with half-precision weights, the master.
# Run by run: what sets a gradient to zero finds it in the cache.
def update(self, weights: List[Tensor], gradients: List[Tensor], state: Tensor, n: int, master: bool, scratch: Tensor, start: List[int], offset: List[int], length: List[int], step: List[int], lr: float, beta1: float, beta2: float, epsilon: float, decay: float, limit: float, divisor: float, clear: bool) -> int:
    # What 32 bits cannot hold, of a very large norm or scale, is divided by in two steps.
    far = 1.0
    if abs(divisor) > 1e30:
        far = 2.0 ** 96
    if abs(divisor) < 1e-30:
        far = 2.0 ** -96
    for i in range(len(weights)):
        w = self.place(weights[i], start[i], length[i])
        own = gradients[i].reshape([-1]).narrow(0, start[i], length[i])
        g = own
        if own.dtype != 6:
            g = scratch.narrow(0, 0, length[i])
            g.copy_(own)
        m = state.narrow(0, offset[i], length[i])
        v = state.narrow(0, n + offset[i], length[i])
        x = w
        if master:
            x = state.narrow(0, 2 * n + offset[i], length[i])
        if limit > 0.0:
            g.clamp_(-limit, limit)
        if far != 1.0:
            g.mul_(1.0 / far)
        self.adamw(x, g, m, v, step[i], lr, beta1, beta2, epsilon, decay, divisor / far)
        if master:
            w.copy_(x)
        if clear:
            own.zero_()
    return 0

def shrink(self, weights: List[Tensor], state: Tensor, n: int, master: bool, start: List[int], offset: List[int], length: List[int], factor: float) -> int:
    for i in range(len(weights)):
        w = self.place(weights[i], start[i], length[i])
        if master:
            x = state.narrow(0, 2 * n + offset[i], length[i])
            x.mul_(factor)
            w.copy_(x)
        else:
            w.mul_(factor)
    return 0

def move(self, target: Tensor, source: Tensor, n: int, parts: int, first: int, last: int) -> int:
    for i in range(parts):
        target.narrow(0, i * n + first, last - first).copy_(source.narrow(0, i * n + first, last - first))
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

def type_code(self, x: Tensor) -> float:
    return float(int(x.dtype))

def are_contiguous(self, arrays: List[Tensor]) -> bool:
    contiguous = True
    for i in range(len(arrays)):
        contiguous = contiguous and arrays[i].is_contiguous()
    return contiguous

def zero(self, arrays: List[Tensor]) -> int:
    for i in range(len(arrays)):
        arrays[i].zero_()
    return 0

def copy(self, target: Tensor, target_start: int, source: Tensor, source_start: int, length: int) -> int:
    target.view([-1]).narrow(0, target_start, length).copy_(source.reshape([-1]).narrow(0, source_start, length))
    return 0
