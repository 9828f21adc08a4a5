# Vocabulary projection and cross-entropy by blocks of tokens. All arithmetic is F32.
#   hidden [.., H]  weight [V, H]  bias [V] or empty  rows [n]: the valid tokens  labels [n]
#   factor [n]: what a token's loss is multiplied with
# A strip is a range of vocabulary columns that starts at `first`; logits and p are [block, strip].

# (rows, labels, [first row with an unusable label, or -1])
def tokens(self, labels: Tensor, ignored: int, vocab: int) -> Tuple[Tensor, Tensor, Tensor]:
    flat = labels.reshape([-1])
    whole = flat.to(dtype=4)
    valid = torch.ne(whole, ignored)
    inside = torch.logical_and(torch.ge(whole, 0), torch.lt(whole, vocab))
    usable = torch.logical_and(inside, torch.eq(whole.to(dtype=flat.dtype), flat))
    wrong = torch.nonzero(torch.logical_and(valid, torch.logical_not(usable))).reshape([-1])
    bad = torch.cat([wrong, torch.full([1], -1, dtype=4, device=flat.device)]).narrow(0, 0, 1)
    rows = torch.nonzero(valid).reshape([-1])
    return (rows, whole.index_select(0, rows), bad)

def factors(self, rows: Tensor, weights: Tensor, upstream: Tensor, scale: float) -> Tensor:
    out = torch.full([rows.size(0)], scale, dtype=6, device=rows.device)
    if weights.numel() > 0:
        out.mul_(weights.reshape([-1]).index_select(0, rows))
    if upstream.numel() > 0:
        out.mul_(upstream.reshape([-1]).index_select(0, rows))
    return out

# Fills `out` with logits; with a softcap also `slope`, unless empty, with (1 - (logit / cap)^2).
def strip_logits(self, x: Tensor, weight: Tensor, bias: Tensor, scale: float, cap: float, out: Tensor, slope: Tensor) -> int:
    torch.mm(x if scale == 1.0 else x * scale, weight.t(), out=out)
    if bias.numel() > 0:
        out.add_(bias if scale == 1.0 else bias * scale)
    if cap > 0.0:
        out.div_(cap).tanh_()
        if slope.numel() > 0:
            torch.mul(out, out, out=slope)
            slope.neg_().add_(1.0)
        out.mul_(cap)
    return 0

# Folds a strip into the state (m, z, y, s) of its tokens; leaves exp(logits - m) in `logits`.
def strip_fold(self, logits: Tensor, labels: Tensor, first: int, m: Tensor, z: Tensor, y: Tensor, s: Tensor, smooth: bool) -> int:
    columns = logits.size(1)
    if columns > 0:
        local = labels - first
        inside = torch.logical_and(torch.ge(local, 0), torch.lt(local, columns))
        at = local.clamp(0, columns - 1).unsqueeze(1)
        y.copy_(torch.where(inside, logits.gather(1, at).squeeze(1), y))
        highest = torch.amax(logits, [1])
        if smooth:
            s.add_(torch.where(torch.isneginf(highest), torch.zeros_like(s), logits.sum([1])))
        highest = torch.maximum(m, highest)
        # a row that is -inf so far has nothing to be measured against
        base = torch.where(torch.isneginf(highest), torch.zeros_like(m), highest)
        z.mul_(torch.exp(m - base)).add_(logits.sub_(base.unsqueeze(1)).exp_().sum([1]))
        m.copy_(highest)
    return 0

# Moves `best` to the strip's column with the highest logit, the first of several, where that is above
# the maximum m of the strips before.
def strip_best(self, logits: Tensor, first: int, m: Tensor, best: Tensor) -> int:
    if logits.size(1) > 0:
        highest, at = torch.max(logits, 1)
        best.copy_(torch.where(torch.gt(highest, m), at + first, best))
    return 0

# Turns p (up to a row's `multiplier`) into the gradient of x weight^T + bias.
def strip_gradient(self, p: Tensor, slope: Tensor, labels: Tensor, first: int, multiplier: Tensor, factor: Tensor, smoothing: float, vocab: int, cap: float) -> int:
    columns = p.size(1)
    if columns > 0:
        local = labels - first
        inside = torch.logical_and(torch.ge(local, 0), torch.lt(local, columns))
        at = local.clamp(0, columns - 1).unsqueeze(1)
        p.mul_(multiplier.unsqueeze(1))
        if smoothing > 0.0:
            p.sub_((factor * (smoothing / vocab)).unsqueeze(1))
        hit = torch.where(inside, factor * (smoothing - 1.0), torch.zeros_like(factor))
        p.scatter_add_(1, at, hit.unsqueeze(1))
        if cap > 0.0:
            p.mul_(slope)
    return 0

# Adds what a strip's logit gradient contributes; an empty array is a gradient nobody wants.
def strip_accumulate(self, d: Tensor, x: Tensor, weight: Tensor, rows: Tensor, dx: Tensor, dw: Tensor, db: Tensor) -> int:
    if dx.numel() > 0:
        dx.index_add_(0, rows, torch.mm(d, weight))
    if dw.numel() > 0:
        dw.addmm_(d.t(), x)
    if db.numel() > 0:
        db.add_(d.sum([0]))
    return 0

# losses [n] (times factor) and lse [n] out of the folded state
def state_loss(self, m: Tensor, z: Tensor, y: Tensor, s: Tensor, factor: Tensor, smoothing: float, zeta: float, vocab: int, losses: Tensor, lse: Tensor) -> int:
    logz = torch.log(z)
    torch.add(m, logz, out=lse)
    # from the maximum, since lse - y cancels when logits are large
    loss = (m - y + logz) * (1.0 - smoothing)
    if smoothing > 0.0:
        loss = loss + (m - s / vocab + logz) * smoothing
    if zeta > 0.0:
        loss = loss + lse * lse * zeta
    torch.mul(loss, factor, out=losses)
    return 0

# Losses of all blocks over one strip that is the whole vocabulary. If a gradient is wanted, it is
# formed while the block's logits are in hand: three matrix products in all. Unless they are empty, nll
# is filled with the tokens' negative log-likelihoods, and best with their likeliest ids.
def fused(self, hidden: Tensor, weight: Tensor, bias: Tensor, rows: Tensor, labels: Tensor, factor: Tensor, scale: float, cap: float, smoothing: float, zeta: float, block: int, losses: Tensor, lse: Tensor, nll: Tensor, best: Tensor, dhidden: Tensor, dw: Tensor, db: Tensor) -> int:
    n = rows.size(0)
    vocab = weight.size(0)
    flat = hidden.reshape([-1, weight.size(1)])
    dx = dhidden.view([-1, weight.size(1)]) if dhidden.numel() > 0 else dhidden
    wide = weight.to(dtype=6)
    offset = bias.to(dtype=6)
    size = min(block, n)
    scratch = torch.empty([size, vocab], dtype=6, device=flat.device)
    wanted = dx.numel() + dw.numel() + db.numel() > 0
    capped = wanted and cap > 0.0
    slopes = torch.empty([size if capped else 0, vocab], dtype=6, device=flat.device)
    dx.zero_()
    dw.zero_()
    db.zero_()
    for i in range((n + block - 1) // block):
        b = i * block
        c = min(block, n - b)
        at = rows.narrow(0, b, c)
        target = labels.narrow(0, b, c)
        f = factor.narrow(0, b, c)
        x = flat.index_select(0, at).to(dtype=6)
        logits = scratch.narrow(0, 0, c)
        slope = slopes.narrow(0, 0, c if capped else 0)
        self.strip_logits(x, wide, offset, scale, cap, logits, slope)
        m = torch.full_like(f, float("-inf"))
        z = torch.zeros_like(f)
        y = torch.zeros_like(f)
        s = torch.zeros_like(f)
        if best.numel() > 0:
            ids = best.narrow(0, b, c)
            ids.fill_(-1)
            self.strip_best(logits, 0, m, ids)
        self.strip_fold(logits, target, 0, m, z, y, s, smoothing > 0.0)
        if nll.numel() > 0:
            torch.add(m - y, torch.log(z), out=nll.narrow(0, b, c))
        l = lse.narrow(0, b, c)
        self.state_loss(m, z, y, s, f, smoothing, zeta, vocab, losses.narrow(0, b, c), l)
        if wanted:
            g = f * scale
            self.strip_gradient(logits, slope, target, 0, g * (1.0 + 2.0 * zeta * l) / z, g, smoothing, vocab, cap)
            self.strip_accumulate(logits, x, wide, at, dx, dw, db)
    return 0

# The gradients when factors become known only after forward, from the lse kept then.
def backward(self, hidden: Tensor, weight: Tensor, bias: Tensor, rows: Tensor, labels: Tensor, factor: Tensor, scale: float, cap: float, smoothing: float, zeta: float, block: int, lse: Tensor, dhidden: Tensor, dw: Tensor, db: Tensor) -> int:
    n = rows.size(0)
    vocab = weight.size(0)
    flat = hidden.reshape([-1, weight.size(1)])
    dx = dhidden.view([-1, weight.size(1)]) if dhidden.numel() > 0 else dhidden
    wide = weight.to(dtype=6)
    offset = bias.to(dtype=6)
    size = min(block, n)
    scratch = torch.empty([size, vocab], dtype=6, device=flat.device)
    slopes = torch.empty([size if cap > 0.0 else 0, vocab], dtype=6, device=flat.device)
    dx.zero_()
    dw.zero_()
    db.zero_()
    for i in range((n + block - 1) // block):
        b = i * block
        c = min(block, n - b)
        at = rows.narrow(0, b, c)
        x = flat.index_select(0, at).to(dtype=6)
        logits = scratch.narrow(0, 0, c)
        slope = slopes.narrow(0, 0, c if cap > 0.0 else 0)
        self.strip_logits(x, wide, offset, scale, cap, logits, slope)
        l = lse.narrow(0, b, c)
        logits.sub_(l.unsqueeze(1)).exp_()
        g = factor.narrow(0, b, c) * scale
        self.strip_gradient(logits, slope, labels.narrow(0, b, c), 0, g * (1.0 + 2.0 * zeta * l), g, smoothing, vocab, cap)
        self.strip_accumulate(logits, x, wide, at, dx, dw, db)
    return 0

# [sum of losses, sum of the z-loss in them], added in double precision
def totals(self, losses: Tensor, lse: Tensor, factor: Tensor, zeta: float) -> Tensor:
    z = torch.sum(lse * lse * factor, dtype=7) * zeta
    return torch.stack([torch.sum(losses, dtype=7), z])

# [sum of the negative log-likelihoods, number of right predictions]
def scores(self, nll: Tensor, best: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([torch.sum(nll, dtype=7), torch.sum(torch.eq(best, labels), dtype=7)])

def spread(self, out: Tensor, rows: Tensor, losses: Tensor) -> int:
    out.zero_()
    out.view([-1]).index_copy_(0, rows, losses)
    return 0

def cast(self, x: Tensor, like: Tensor) -> Tensor:
    return x.to(dtype=like.dtype)

# The same losses by operations that autograd records; holds all logits.
#   options: scale, cap, smoothing, zeta, ignored label, factor
def plain(self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, weights: Tensor, options: Tensor) -> Tuple[Tensor, Tensor]:
    scale = float(options[0])
    cap = float(options[1])
    smoothing = float(options[2])
    zeta = float(options[3])
    flat = labels.reshape([-1]).to(dtype=4)
    rows = torch.nonzero(torch.ne(flat, int(options[4]))).reshape([-1])
    target = flat.index_select(0, rows)
    x = hidden.reshape([-1, weight.size(1)]).index_select(0, rows).to(dtype=6)
    logits = torch.mm(x, weight.to(dtype=6).t())
    if bias.numel() > 0:
        logits = logits + bias
    logits = logits * scale
    if cap > 0.0:
        logits = torch.tanh(logits / cap) * cap
    lse = torch.logsumexp(logits, [1])
    loss = (lse - logits.gather(1, target.unsqueeze(1)).squeeze(1)) * (1.0 - smoothing)
    if smoothing > 0.0:
        loss = loss + (lse - logits.mean([1])) * smoothing
    z = lse * lse * zeta
    if zeta > 0.0:
        loss = loss + z
    factor = torch.full_like(lse, float(options[5]))
    if weights.numel() > 0:
        factor = factor * weights.reshape([-1]).index_select(0, rows)
    each = torch.zeros([flat.size(0)], dtype=6, device=flat.device).index_add(0, rows, loss * factor)
    return (each.reshape(labels.size()), (z.detach() * factor).sum())
