# A small y may be an array of Java values: its memory is Java's, and goes with the array object.
def anchor(self, y: Tensor) -> Tuple[Tensor, Tensor]:
    leaf = torch.zeros(annotate(List[int], []), dtype=y.dtype, device=y.device).expand(y.size()).detach().requires_grad_(True)
    out = y.detach()
    if y.numel() <= 1024:
        out = out.clone()
    out.add_(leaf)
    return (out, leaf)

# An empty gradient refuses later ones by its size; a single number would be added to it without a word.
def release(self, g: Tensor) -> int:
    if g.numel() == 1:
        g.zero_()
        return 0
    torch.set_(g, torch.empty([0], dtype=g.dtype, device=g.device))
    return 0

def is_late(self, g: Tensor) -> bool:
    if g.numel() != 1:
        return g.numel() > 1
    return annotate(float, g.sum().item()) != 0.0

def zeros(self, like: Tensor) -> Tensor:
    return torch.zeros(annotate(List[int], []), dtype=like.dtype, device=like.device).expand(like.size())

def view(self, x: Tensor) -> Tensor:
    return x.view_as(x)

def share_memory(self, x: Tensor, y: Tensor) -> bool:
    if x.numel() != y.numel() or not x.is_contiguous() or not y.is_contiguous():
        return False
    return x.view([-1]).is_set_to(y.view([-1]))
