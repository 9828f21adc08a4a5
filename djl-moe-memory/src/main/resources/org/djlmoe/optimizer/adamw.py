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

# Gradients are set to zero if that is asked for, each piece while it is in the cache, unless they are no single run of
# memory: then what is cut of them may be a copy.
def update(self, weights: List[Tensor], gradients: List[Tensor], state: Tensor, n: int, master: bool, scratch: Tensor, start: List[int], offset: List[int], length: List[int], step: List[int], lr: float, beta1: float, beta2: float, epsilon: float, decay: float, limit: float, divisor: float, zero: bool) -> int:
    w = self.places(weights, start, length)
    own = self.slabs(gradients, start, length)
    g = self.floats(own, scratch, offset, length)
    m = self.parts(state, 0, offset, length)
    v = self.parts(state, n, offset, length)
    if limit > 0.0:
        for i in range(len(g)):
            g[i].clamp_(-limit, limit)
    x = self.parts(state, 2 * n, offset, length) if master else w
    pieces = self.pieces(length)
    for k in range(len(pieces)):
        slab, first, size = pieces[k]
        px = self.cut(x, slab, first, size)
        pg = self.cut(g, slab, first, size)
        steps = annotate(List[int], [])
        for i in slab:
            steps.append(step[i])
        self.adamw(px, pg, self.cut(m, slab, first, size), self.cut(v, slab, first, size), steps, lr, beta1, beta2, epsilon, decay, divisor)
        if zero:
            po = self.cut(own, slab, first, size)
            for i in range(len(slab)):
                if gradients[slab[i]].is_contiguous():
                    po[i].zero_()
    if master:
        for i in range(len(w)):
            w[i].copy_(x[i])
    return 0

def cut(self, arrays: List[Tensor], slab: List[int], first: List[int], size: List[int]) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    for i in range(len(slab)):
        out.append(arrays[slab[i]].narrow(0, first[i], size[i]))
    return out

# Slabs in pieces of about a million elements together: which slab, from where, how many. Slabs are cut at multiples of 64,
# as everywhere, since a vector's tail may round differently.
def pieces(self, length: List[int]) -> List[Tuple[List[int], List[int], List[int]]]:
    out = annotate(List[Tuple[List[int], List[int], List[int]]], [])
    slab = annotate(List[int], [])
    first = annotate(List[int], [])
    size = annotate(List[int], [])
    room = 1048576
    for i in range(len(length)):
        done = 0
        while done < length[i]:
            count = min(length[i] - done, max(64, room // 64 * 64))
            slab.append(i)
            first.append(done)
            size.append(count)
            done += count
            room -= count
            if room <= 0:
                out.append((slab, first, size))
                slab = annotate(List[int], [])
                first = annotate(List[int], [])
                size = annotate(List[int], [])
                room = 1048576
    if len(slab) > 0:
        out.append((slab, first, size))
    return out

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

def zero(self, arrays: List[Tensor], only_scattered: bool) -> int:
    for i in range(len(arrays)):
        if not only_scattered or not arrays[i].is_contiguous():
            arrays[i].zero_()
    return 0

def copy(self, target: Tensor, target_start: int, source: Tensor, source_start: int, length: int) -> int:
    target.view([-1]).narrow(0, target_start, length).copy_(source.reshape([-1]).narrow(0, source_start, length))
    return 0
