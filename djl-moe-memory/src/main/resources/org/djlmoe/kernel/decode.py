# Decoding with a cache of keys and values: S new tokens a sequence after those that the cache holds. Nothing is recorded.
# x [B S, H], sequence after sequence; dims, weights and window as in attention.py.
# keys and values [B, m, C, d], of which `used` positions are filled; the first new token is at `position` of its text.
# cos and sin [P, d / 2], a row a position of the text.

def rotary_tables(self, theta: float, cos: Tensor, sin: Tensor) -> int:
    c, s = self.rotary_table(cos.size(0), 2 * cos.size(1), theta, cos)
    cos.copy_(c)
    sin.copy_(s)
    return 0

# Moves the last `keep` positions to the front.
def cache_shift(self, keys: Tensor, values: Tensor, used: int, keep: int) -> int:
    keys[:, :, :keep].copy_(keys[:, :, used - keep:used].clone())
    values[:, :, :keep].copy_(values[:, :, used - keep:used].clone())
    return 0

# One query a head and sequence sees all keys given, so there is no mask; queries that share a KV head are its rows.
def attend_token(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, n, s, d = q.size()
    m = k.size(1)
    scores = torch.matmul(q.reshape([b, m, n // m, d]), k.transpose(2, 3)).mul_(torch.pow(d, -0.5))
    return torch.matmul(torch.softmax(scores, 3), v).reshape([b, n, 1, d])

def attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    n = q.size(1)
    old = k.size(2) - q.size(2)
    query = torch.arange(old, k.size(2), device=q.device).unsqueeze(1)
    key = torch.arange(k.size(2), device=q.device).unsqueeze(0)
    seen = key <= query
    if window > 0:
        seen = torch.logical_and(seen, key > query - window)
    bias = torch.where(seen, 0.0, float('-inf')).to(q.dtype)
    return torch.scaled_dot_product_attention(q, self.expand_heads(k, n), self.expand_heads(v, n), bias, 0., False)

# y = x + attention(norm(x)) wo'; appends the new keys and values.
def attention_cached(self, x: Tensor, weights: List[Tensor], eps: float, dims: List[int], cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, used: int, position: int, y: Tensor) -> int:
    s = dims[0]
    window = dims[4]
    last = used + s
    h = self.rms_norm(x, weights[0], eps)
    c = cos[position:position + s]
    r = sin[position:position + s]
    q = self.rotate(self.split_heads(self.project(h, weights[1]), s, dims[1]), c, r)
    keys[:, :, used:last].copy_(self.rotate(self.split_heads(self.project(h, weights[2]), s, dims[2]), c, r))
    values[:, :, used:last].copy_(self.split_heads(self.project(h, weights[3]), s, dims[2]))
    first = max(0, used - window + 1) if window > 0 else 0
    k = keys[:, :, first:last]
    v = values[:, :, first:last]
    if s == 1:
        out = self.attend_token(q, k, v)
    else:
        out = self.attend_chunk(q, k, v, window)
    torch.add(x, self.project(self.join_heads(out), weights[4]), out=y)
    return 0

# One expert on the routes (row * k + choice) that go to it, h [N, H] normed; fills the rows `routes` of out [N k, H].
def expert_routes(self, h: Tensor, gate_up: Tensor, down: Tensor, routes: List[int], k: int, out: Tensor) -> int:
    if len(routes) == 1:
        row = routes[0] // k
        out[routes[0]:routes[0] + 1].copy_(self.swiglu(h[row:row + 1], gate_up, down))
    else:
        at = torch.tensor(routes, dtype=4, device=h.device)
        out.index_copy_(0, at, self.swiglu(h.index_select(0, torch.floor_divide(at, k)), gate_up, down))
    return 0

def swiglu(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    inner = down.size(1)
    gu = self.project(x, gate_up)
    return self.project(torch.silu(gu[:, :inner]).mul_(gu[:, inner:]), down)

# Adds to x [N, H] what the shared experts make of h: gate_up [1, 2 S, H], down [1, H, S], gate [1, H] or empty.
def add_shared(self, h: Tensor, gate_up: Tensor, down: Tensor, gate: Tensor, x: Tensor) -> int:
    out = self.swiglu(h, gate_up[0], down[0])
    if gate.numel() > 0:
        out.mul_(torch.sigmoid(torch.mm(h, gate.t())))
    x.add_(out)
    return 0

# y = x + the weighted sum over each row's k experts, always in the order of the choices.
def combine_routes(self, x: Tensor, combine: Tensor, out: Tensor, y: Tensor) -> int:
    weighted = out.reshape([x.size(0), combine.size(1), x.size(1)]) * combine.unsqueeze(2)
    torch.add(x, weighted.sum(1), out=y)
    return 0

# Logits of the last of S tokens a sequence, or of all.
def logits(self, x: Tensor, s: int, gamma: Tensor, eps: float, head: Tensor, every: bool) -> Tensor:
    rows = x if every else x.reshape([-1, s, x.size(1)])[:, s - 1]
    return torch.mm(self.rms_norm(rows, gamma, eps), head.t())

# Memory for one expert as a flat array, in F32 or BF16.
def expert_memory(self, elements: int, half: bool) -> Tensor:
    return torch.zeros([elements], dtype=15 if half else 6)

# (gate and up [2 I, H], down [H, I]) of such an array, as views
def expert_views(self, memory: Tensor, inner: int, hidden: int) -> Tuple[Tensor, Tensor]:
    n = 2 * inner * hidden
    return (memory[:n].view([2 * inner, hidden]), memory[n:].view([hidden, inner]))
