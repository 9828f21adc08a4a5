# Causal self-attention with rotary positions, grouped KV heads and an optional sliding window.
# Rows are B sequences of S tokens, one after the other: x [B S, H]. Heads: n query heads, m key/value heads of width d.
# dims = [S, n, m, d, window]; window 0 sees every earlier token, w sees the token itself and the w - 1 before it.
# weights = [gamma [H], wq [n d, H], wk [m d, H], wv [m d, H], wo [H, n d]]; grads likewise, empty where frozen.

# cos and sin [S, d / 2] of the angles p / theta^(2 i / d)
def rotary_table(self, s: int, d: int, theta: float, x: Tensor) -> Tuple[Tensor, Tensor]:
    inverse = torch.reciprocal(torch.pow(theta, torch.arange(0, d, 2, dtype=6, device=x.device) / d))
    angles = torch.outer(torch.arange(s, dtype=6, device=x.device), inverse)
    return (torch.cos(angles), torch.sin(angles))

# Rotates the pairs (i, i + d / 2) of x [B, heads, S, d]. For d = 2, cat takes its inputs for a channels-last image and
# lays the result out so; the flash operators assume neighbours along the last axis, and do not check.
def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(1)
    a = x[:, :, :, :half]
    b = x[:, :, :, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).contiguous(memory_format=0)

def split_heads(self, x: Tensor, s: int, heads: int) -> Tensor:
    return x.reshape([-1, s, heads, x.size(1) // heads]).transpose(1, 2)

def join_heads(self, x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape([x.size(0) * x.size(2), x.size(1) * x.size(3)])

# Attention over fewer KV heads than query heads leaves the fast path, so they are expanded first.
def expand_heads(self, x: Tensor, heads: int) -> Tensor:
    m = x.size(1)
    if m == heads:
        return x
    return x.unsqueeze(2).expand([x.size(0), m, heads // m, x.size(2), x.size(3)]).reshape([x.size(0), heads, x.size(2), x.size(3)])

def reduce_heads(self, g: Tensor, m: int) -> Tensor:
    if g.size(1) == m:
        return g
    return g.reshape([g.size(0), m, g.size(1) // m, g.size(2), g.size(3)]).sum(2)

def project_heads(self, h: Tensor, weights: List[Tensor], dims: List[int], theta: float) -> Tuple[Tensor, Tensor, Tensor]:
    s = dims[0]
    cos, sin = self.rotary_table(s, dims[3], theta, h)
    q = self.rotate(self.split_heads(self.project(h, weights[1]), s, dims[1]), cos, sin)
    k = self.rotate(self.split_heads(self.project(h, weights[2]), s, dims[2]), cos, sin)
    v = self.split_heads(self.project(h, weights[3]), s, dims[2])
    return (q, self.expand_heads(k, dims[1]), self.expand_heads(v, dims[1]))

# Additive mask for a block of w queries on the w keys before it and its own.
def window_mask(self, w: int, x: Tensor) -> Tensor:
    query = torch.arange(w, 2 * w, device=x.device).unsqueeze(1)
    key = torch.arange(2 * w, device=x.device).unsqueeze(0)
    seen = torch.logical_and(key <= query, key > query - w)
    return torch.where(seen, 0.0, float('-inf')).to(x.dtype)

# Returns the attended values [B, n, S, d] and the log-sum-exp of the scores.
def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tuple[Tensor, Tensor]:
    s = q.size(2)
    if window == 0 or s <= window:
        o, l = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0., True)
        return (o, l)
    mask = self.window_mask(window, q)
    outs = annotate(List[Tensor], [])
    lses = annotate(List[Tensor], [])
    for start in range(0, s, window):
        end = min(start + window, s)
        first = max(0, start - window)
        rows = end - start
        bias = mask[:rows, window - (start - first):window + rows]
        o, l = torch._scaled_dot_product_flash_attention_for_cpu(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], 0., False, attn_mask=bias.unsqueeze(0).unsqueeze(0))
        outs.append(o)
        lses.append(l)
    return (torch.cat(outs, 2), torch.cat(lses, 2))

def attend_backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int) -> Tuple[Tensor, Tensor, Tensor]:
    s = q.size(2)
    if window == 0 or s <= window:
        dq, dk, dv = torch._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0., True)
        return (dq, dk, dv)
    mask = self.window_mask(window, q)
    dqs = annotate(List[Tensor], [])
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for start in range(0, s, window):
        end = min(start + window, s)
        first = max(0, start - window)
        rows = end - start
        bias = mask[:rows, window - (start - first):window + rows]
        a, b, c = torch._scaled_dot_product_flash_attention_for_cpu_backward(g[:, :, start:end], q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], out[:, :, start:end], lse[:, :, start:end], 0., False, attn_mask=bias.unsqueeze(0).unsqueeze(0))
        dqs.append(a)
        dk[:, :, first:end].add_(b)
        dv[:, :, first:end].add_(c)
    return (torch.cat(dqs, 2), dk, dv)

# The same with ordinary operations that autograd can follow, and for devices without the operator above.
def attend_plain(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    s = q.size(2)
    if window == 0 or s <= window:
        return torch.scaled_dot_product_attention(q, k, v, None, 0., True)
    mask = self.window_mask(window, q)
    outs = annotate(List[Tensor], [])
    for start in range(0, s, window):
        end = min(start + window, s)
        first = max(0, start - window)
        rows = end - start
        bias = mask[:rows, window - (start - first):window + rows]
        outs.append(torch.scaled_dot_product_attention(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], bias, 0., False))
    return torch.cat(outs, 2)

# y = x + attention(norm(x)) wo'
def attention_forward(self, x: Tensor, weights: List[Tensor], eps: float, dims: List[int], theta: float, y: Tensor) -> int:
    h = self.rms_norm(x, weights[0], eps)
    q, k, v = self.project_heads(h, weights, dims, theta)
    if x.is_cuda:
        out = self.attend_plain(q, k, v, dims[4])
    else:
        out, lse = self.attend(q, k, v, dims[4])
    torch.add(x, self.project(self.join_heads(out), weights[4]), out=y)
    return 0

# From here back through the heads: adds to grads and returns dx.
def heads_backward(self, x: Tensor, h: Tensor, g: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, weights: List[Tensor], grads: List[Tensor], eps: float, dims: List[int], theta: float) -> Tensor:
    cos, sin = self.rotary_table(dims[0], dims[3], theta, x)
    q = self.join_heads(self.rotate(dq, cos, -sin))
    k = self.join_heads(self.rotate(self.reduce_heads(dk, dims[2]), cos, -sin))
    v = self.join_heads(self.reduce_heads(dv, dims[2]))
    self.accumulate(grads[1], q, h, 1.0)
    self.accumulate(grads[2], k, h, 1.0)
    self.accumulate(grads[3], v, h, 1.0)
    dh = self.project_back(q, weights[1]) + self.project_back(k, weights[2]) + self.project_back(v, weights[3])
    return self.rms_norm_backward(x, weights[0], eps, dh, grads[0]).add_(g)

def attention_backward(self, x: Tensor, g: Tensor, weights: List[Tensor], grads: List[Tensor], eps: float, dims: List[int], theta: float, dx: Tensor) -> int:
    h = self.rms_norm(x, weights[0], eps)
    q, k, v = self.project_heads(h, weights, dims, theta)
    out, lse = self.attend(q, k, v, dims[4])
    self.accumulate(grads[4], g, self.join_heads(out), 1.0)
    dout = self.split_heads(self.project_back(g, weights[4]), dims[0], dims[1])
    dq, dk, dv = self.attend_backward(dout, q, k, v, out, lse, dims[4])
    dx.copy_(self.heads_backward(x, h, g, dq, dk, dv, weights, grads, eps, dims, theta))
    return 0

# For devices without the direct operators: autograd inside the kernel. Needs normal mode (record), not run.
# numbers = [S, n, m, d, window, eps, theta] as an array, for want of another way to pass them
def attention_backward_generic(self, x: Tensor, g: Tensor, weights: List[Tensor], grads: List[Tensor], numbers: Tensor, dx: Tensor) -> Tensor:
    values = annotate(List[float], numbers.tolist())
    dims = [int(values[0]), int(values[1]), int(values[2]), int(values[3]), int(values[4])]
    h = self.rms_norm(x, weights[0], values[5])
    q0, k0, v0 = self.project_heads(h, weights, dims, values[6])
    torch.set_grad_enabled(True)
    q = q0.detach().requires_grad_(True)
    k = k0.detach().requires_grad_(True)
    v = v0.detach().requires_grad_(True)
    out = self.attend_plain(q, k, v, dims[4])
    dout = self.split_heads(self.project_back(g, weights[4]), dims[0], dims[1])
    got = torch.grad([out], [q, k, v], annotate(List[Optional[Tensor]], [dout]))
    torch.set_grad_enabled(False)
    self.accumulate(grads[4], g, self.join_heads(out.detach()), 1.0)
    dq = got[0]
    dk = got[1]
    dv = got[2]
    if dq is not None and dk is not None and dv is not None:
        dx.copy_(self.heads_backward(x, h, g, unchecked_cast(Tensor, dq), unchecked_cast(Tensor, dk), unchecked_cast(Tensor, dv), weights, grads, values[5], dims, values[6]))
    return dx

def attention_plain(self, x: Tensor, weights: List[Tensor], numbers: Tensor) -> Tensor:
    values = annotate(List[float], numbers.tolist())
    dims = [int(values[0]), int(values[1]), int(values[2]), int(values[3]), int(values[4])]
    h = self.rms_norm(x, weights[0], values[5])
    q, k, v = self.project_heads(h, weights, dims, values[6])
    return x + self.project(self.join_heads(self.attend_plain(q, k, v, dims[4])), weights[4])
