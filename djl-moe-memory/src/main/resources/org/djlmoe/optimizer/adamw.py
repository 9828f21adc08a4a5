def slabs(self, arrays: List[Tensor], start: List[int], length: List[int]) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    for i in range(len(arrays)):
        out.append(arrays[i].reshape([-1]).narrow(0, start[i], length[i]))
    return out

# A weight that is no single run of memory is refused: what is written to a copy would be lost.
def places(self, weights: List[Tensor], start: List[int], length: List[int]) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    for i in range(len(weights)):
        out.append(weights[i].view([-1]).narrow(0, start[i], length[i]))
    return out

# The state of a bucket of n elements: exp_avg, exp_avg_sq and, with half-precision weights, the master.
def parts(self, state: Tensor, first: int, offset: List[int], length: List[int]) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    for i in range(len(offset)):
        out.append(state.narrow(0, first + offset[i], length[i]))
    return out

def floats(self, gradients: List[Tensor], scratch: Tensor, offset: List[int], length: List[int]) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    for i in range(len(gradients)):
        if gradients[i].dtype == 6:
            out.append(gradients[i])
        else:
            wide = scratch.narrow(0, offset[i], length[i])
            wide.copy_(gradients[i])
            out.append(wide)
    return out

# Run by run: what sets a gradient to zero finds it in the cache.
def update(self, weights: List[Tensor], gradients: List[Tensor], state: Tensor, n: int, master: bool, scratch: Tensor, start: List[int], offset: List[int], length: List[int], step: List[int], lr: float, beta1: float, beta2: float, epsilon: float, decay: float, limit: float, divisor: float, clear: bool) -> int:
    w = self.places(weights, start, length)
    own = self.slabs(gradients, start, length)
    g = self.floats(own, scratch, offset, length)
    m = self.parts(state, 0, offset, length)
    v = self.parts(state, n, offset, length)
    x = w
    if master:
        x = self.parts(state, 2 * n, offset, length)
    # What 32 bits cannot hold, of a very large norm or scale, is divided by in two steps.
    far = 1.0
    if divisor > 1e30:
        far = 2.0 ** 96
    if divisor < 1e-30:
        far = 2.0 ** -96
    for i in range(len(w)):
        j = i + 1
        if limit > 0.0:
            g[i].clamp_(-limit, limit)
        if far != 1.0:
            g[i].mul_(1.0 / far)
        self.adamw(x[i:j], g[i:j], m[i:j], v[i:j], step[i:j], lr, beta1, beta2, epsilon, decay, divisor / far)
        if master:
            w[i].copy_(x[i])
        if clear:
            own[i].zero_()
    return 0

def shrink(self, weights: List[Tensor], state: Tensor, n: int, master: bool, start: List[int], offset: List[int], length: List[int], factor: float) -> int:
    w = self.places(weights, start, length)
    if master:
        x = self.parts(state, 2 * n, offset, length)
        for i in range(len(w)):
            x[i].mul_(factor)
            w[i].copy_(x[i])
    else:
        for i in range(len(w)):
            w[i].mul_(factor)
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

# Only then are slabs no copies.
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
