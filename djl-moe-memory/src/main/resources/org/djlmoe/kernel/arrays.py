def requires_gradient(self, x: Tensor) -> bool:
    return x.requires_grad

# The number of changes made in place so far; arrays made in inference mode do not count theirs.
def version(self, x: Tensor) -> float:
    return -1.0 if x.is_inference() else float(x._version())

def to_half(self, x: Tensor) -> Tensor:
    return x.to(dtype=5)

def to_single(self, x: Tensor) -> Tensor:
    return x.to(dtype=6)

# BF16 (15) tensors.
def is_half(self, x: Tensor) -> bool:
    return x.dtype == 15

def half_zeros(self, like: Tensor) -> Tensor:
    return torch.zeros(like.size(), dtype=15, device=like.device)

def narrowed(self, x: Tensor) -> Tensor:
    return x.to(dtype=15)

def widened(self, x: Tensor) -> Tensor:
    return x.to(dtype=6)

def survives_narrowing(self, x: Tensor) -> bool:
    return torch.equal(x.to(dtype=15).to(dtype=6), x)

# flat [n] from offset on takes the values
def put(self, flat: Tensor, offset: int, values: Tensor) -> int:
    flat[offset:offset + values.size(0)].copy_(values)
    return 0

def replace(self, x: Tensor, values: Tensor) -> int:
    x.copy_(values)
    return 0
