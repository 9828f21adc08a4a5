# Rows first, first + 1, ... of `from`, as many as `rows`, into those of `to` that begin at `at`.
def copy_rows(self, source: Tensor, first: int, rows: int, to: Tensor, at: int) -> int:
    to[at:at + rows].copy_(source[first:first + rows])
    return 0

# The sum in the order of the list, so that every rank gets the same bits.
def sum_of(self, parts: List[Tensor]) -> Tensor:
    total = parts[0].clone(memory_format=0)
    for i in range(1, len(parts)):
        total.add_(parts[i])
    return total

def copy(self, source: Tensor, to: Tensor) -> int:
    to.copy_(source)
    return 0
