def requires_gradient(self, x: Tensor) -> bool:
    return x.requires_grad

# The number of changes made in place so far; arrays made in inference mode do not count theirs.
def version(self, x: Tensor) -> float:
    return -1.0 if x.is_inference() else float(x._version())

def to_half(self, x: Tensor) -> Tensor:
    return x.to(dtype=5)

def to_single(self, x: Tensor) -> Tensor:
    return x.to(dtype=6)
