# Root mean square norm over the last axis: h = x / sqrt(mean(x^2) + eps) * gamma. An empty gamma means h = x.

def rms_norm(self, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    if gamma.numel() == 0:
        return x
    return x * torch.rsqrt((x * x).mean(-1, True) + eps) * gamma

# Returns dx; adds to dgamma unless that is empty.
def rms_norm_backward(self, x: Tensor, gamma: Tensor, eps: float, dh: Tensor, dgamma: Tensor) -> Tensor:
    if gamma.numel() == 0:
        return dh
    rstd = torch.rsqrt((x * x).mean(-1, True) + eps)
    xhat = x * rstd
    if dgamma.numel() > 0:
        dgamma.add_((dh * xhat).reshape([-1, gamma.size(0)]).sum(0))
    g = dh * gamma
    return (g - xhat * (g * xhat).mean(-1, True)).mul_(rstd)

# x w' for a weight of layout (out, in), in the weight's precision; the result has the precision of x.
def project(self, x: Tensor, w: Tensor) -> Tensor:
    if x.dtype == w.dtype:
        return torch.mm(x, w.t())
    return torch.mm(x.to(w.dtype), w.t()).to(x.dtype)

# g w, the gradient of the input of project.
def project_back(self, g: Tensor, w: Tensor) -> Tensor:
    if g.dtype == w.dtype:
        return torch.mm(g, w)
    return torch.mm(g.to(w.dtype), w).to(g.dtype)

# into += scale * g' x, the gradient of the weight of project; an empty into belongs to a frozen weight.
def accumulate(self, into: Tensor, g: Tensor, x: Tensor, scale: float) -> int:
    if into.numel() > 0:
        into.addmm_(g.t(), x, alpha=scale)
    return 0

# How many rows of width h are about 256 Ki numbers.
def rows_a_block(self, h: int) -> int:
    return max(1, 262144 // max(1, h))

# The same for many rows, by blocks of them.
def rms_norm_rows(self, x: Tensor, gamma: Tensor, eps: float, y: Tensor) -> int:
    h = x.size(-1)
    rows = x.reshape([-1, h])
    out = y.view([-1, h])
    block = self.rows_a_block(h)
    n = rows.size(0)
    for i in range((n + block - 1) // block):
        b = i * block
        c = min(block, n - b)
        out.narrow(0, b, c).copy_(self.rms_norm(rows.narrow(0, b, c), gamma, eps))
    return 0

def rms_norm_rows_backward(self, x: Tensor, gamma: Tensor, eps: float, g: Tensor, dx: Tensor, dgamma: Tensor) -> int:
    h = x.size(-1)
    rows = x.reshape([-1, h])
    upstream = g.reshape([-1, h])
    out = dx.view([-1, h])
    block = self.rows_a_block(h)
    n = rows.size(0)
    for i in range((n + block - 1) // block):
        b = i * block
        c = min(block, n - b)
        out.narrow(0, b, c).copy_(self.rms_norm_backward(rows.narrow(0, b, c), gamma, eps, upstream.narrow(0, b, c), dgamma))
    return 0

def rms_norm_plain(self, x: Tensor, gamma: Tensor, eps: Tensor) -> Tensor:
    return self.rms_norm(x, gamma, annotate(float, eps.item()))

def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, ids.reshape(-1))

def embed_rows(self, ids: Tensor, weight: Tensor, y: Tensor) -> int:
    torch.index_select(weight, 0, ids.reshape(-1), out=y)
    return 0

def embed_backward(self, ids: Tensor, g: Tensor, dweight: Tensor) -> int:
    dweight.index_add_(0, ids.reshape(-1), g)
    return 0
