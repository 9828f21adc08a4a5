# Experts of rows that lie anywhere. Routes are grouped by expert and go through it in blocks (expert.py), so that scratch
# is fixed. A rank has experts of its own and, lent for a layer, some of other ranks': two lists of weights, and two of
# gradients, in the order of expert.py. A slot numbers the experts of a rank: its own, then the lent ones.
# A row that travels is H values, then k combine weights, then the k experts they belong to (-1: not for this rank).

def view_rows(self, memory: Tensor, rows: int, width: int) -> Tensor:
    return memory[:rows * width].view(rows, width)

def rows_of(self, array: Tensor, first: int, rows: int) -> Tensor:
    return array[first:first + rows]

def slab(self, stack: Tensor, index: int) -> Tensor:
    return stack[index]

def add_slab(self, stack: Tensor, index: int, part: Tensor) -> int:
    stack[index].add_(part)
    return 0

# As many arrays of the type and shape of the stack's elements.
def new_stack(self, stack: Tensor, count: int) -> Tensor:
    return torch.empty([count, stack.size(1), stack.size(2)], dtype=stack.dtype, device=stack.device)

def fill_zero(self, array: Tensor) -> int:
    array.zero_()
    return 0

def gather_rows(self, x: Tensor, tokens: Tensor, to: Tensor, at: int) -> int:
    torch.index_select(x, 0, tokens, out=to[at:at + tokens.size(0)])
    return 0

# tokens: those for targets[0], counts[0] many, then those for targets[1], ...; destinations [N, k]: the rank of a route.
def pack_rows(self, x: Tensor, ids: Tensor, combine: Tensor, destinations: Tensor, tokens: Tensor, targets: List[int], counts: List[int], to: Tensor, at: int) -> int:
    hidden = x.size(1)
    k = ids.size(1)
    first = 0
    for i in range(len(targets)):
        last = first + counts[i]
        if last > first:
            t = tokens[first:last]
            into = to[at + first:at + last]
            mine = torch.eq(destinations.index_select(0, t), targets[i])
            into[:, :hidden].copy_(x.index_select(0, t))
            into[:, hidden:hidden + k].copy_(combine.index_select(0, t).mul_(mine))
            into[:, hidden + k:].copy_(ids.index_select(0, t).masked_fill_(torch.logical_not(mine), -1))
        first = last
    return 0

# y rows += what has come back for them; a token may have several rows.
def add_rows(self, rows: Tensor, tokens: Tensor, y: Tensor) -> int:
    y.index_add_(0, tokens, rows)
    return 0

# (positions in the flat slot list, grouped by slot; routes a slot); slots above count - 1 are left out.
def group_slots(self, slots: Tensor, count: int) -> Tuple[Tensor, List[int]]:
    order = torch.argsort(slots, stable=True, dim=0, descending=False)
    counts = annotate(List[int], torch.bincount(slots, None, count + 1).tolist())[:count]
    routes = 0
    for n in counts:
        routes += n
    return (order[:routes], counts)

# As above, for rows that have travelled; table [E + 1]: the slot of an expert, and last that of none.
def group_received(self, rows: Tensor, k: int, table: Tensor, count: int) -> Tuple[Tensor, List[int]]:
    experts = rows[:, rows.size(1) - k:].reshape(-1).to(dtype=4)
    return self.group_slots(table.index_select(0, torch.remainder(experts, table.size(0))), count)

# y[rows] += alpha * expert(x[rows]). Scratch: as block_forward, and behind it H for rows.
def routes_forward(self, x: Tensor, rows: Tensor, alpha: Tensor, counts: List[int], own: List[Tensor], lent: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor, y: Tensor) -> int:
    owned = own[2].size(0)
    before = own[3].size(2) * 2 + self.rank(own)
    first = 0
    for slot in range(len(counts)):
        for a, b in self.pieces(first, counts[slot], block):
            r = rows[a:b]
            xs = self.block_rows(wide, block, before, b - a, y.size(1))
            torch.index_select(x, 0, r, out=xs)
            if slot < owned:
                self.block_forward(xs, alpha[a:b], slot, own, scale, block, wide, half)
            else:
                self.block_forward(xs, alpha[a:b], slot - owned, lent, scale, block, wide, half)
            y.index_add_(0, r, xs)
        first += counts[slot]
    return 0

# dx[rows] += ..., dalpha is filled. Scratch: as block_backward, and behind it H for rows and H for gradients.
def routes_backward(self, x: Tensor, g: Tensor, rows: Tensor, alpha: Tensor, counts: List[int], own: List[Tensor], lent: List[Tensor], grads: List[Tensor], lent_grads: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor, dx: Tensor, dalpha: Tensor) -> int:
    owned = own[2].size(0)
    hidden = g.size(1)
    before = own[3].size(2) * 5 + self.rank(own)
    first = 0
    for slot in range(len(counts)):
        for a, b in self.pieces(first, counts[slot], block):
            r = rows[a:b]
            xs = self.block_rows(wide, block, before, b - a, hidden)
            gs = self.block_rows(wide, block, before + hidden, b - a, hidden)
            torch.index_select(x, 0, r, out=xs)
            torch.index_select(g, 0, r, out=gs)
            if slot < owned:
                self.block_backward(xs, gs, alpha[a:b], dalpha[a:b], slot, own, grads, scale, block, wide, half)
            else:
                self.block_backward(xs, gs, alpha[a:b], dalpha[a:b], slot - owned, lent, lent_grads, scale, block, wide, half)
            dx.index_add_(0, r, gs)
        first += counts[slot]
    return 0

# Rows of this process: x [N, H], the chunk's tokens [n], ids [N, k] and combine [N, k] where they lie.
def local_forward(self, x: Tensor, tokens: Tensor, ids: Tensor, combine: Tensor, weights: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor, y: Tensor) -> int:
    k = ids.size(1)
    order, counts = self.group_slots(ids.index_select(0, tokens).reshape(-1), weights[2].size(0))
    rows = tokens.index_select(0, torch.floor_divide(order, k))
    alpha = combine.reshape(-1).index_select(0, rows * k + torch.remainder(order, k)).unsqueeze(1)
    return self.routes_forward(x, rows, alpha, counts, weights, weights, scale, block, wide, half, y)

def local_backward(self, x: Tensor, tokens: Tensor, g: Tensor, ids: Tensor, combine: Tensor, weights: List[Tensor], grads: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor, dx: Tensor, dcombine: Tensor) -> int:
    k = ids.size(1)
    order, counts = self.group_slots(ids.index_select(0, tokens).reshape(-1), weights[2].size(0))
    rows = tokens.index_select(0, torch.floor_divide(order, k))
    route = rows * k + torch.remainder(order, k)
    alpha = combine.reshape(-1).index_select(0, route).unsqueeze(1)
    dalpha = torch.empty([route.size(0)], dtype=x.dtype, device=x.device)
    self.routes_backward(x, g, rows, alpha, counts, weights, weights, grads, grads, scale, block, wide, half, dx, dalpha)
    dcombine.view(-1).index_copy_(0, route, dalpha)
    return 0

# Rows that have travelled [R, H + 2 k]. out [R, H] is overwritten.
def received_forward(self, rows: Tensor, k: int, table: Tensor, slots: int, own: List[Tensor], lent: List[Tensor], block: int, wide: Tensor, half: Tensor, out: Tensor) -> int:
    hidden = out.size(1)
    order, counts = self.group_received(rows, k, table, slots)
    alpha = rows[:, hidden:hidden + k].reshape(-1).index_select(0, order).unsqueeze(1)
    out.zero_()
    return self.routes_forward(rows[:, :hidden], torch.floor_divide(order, k), alpha, counts, own, lent, 0.0, block, wide, half, out)

# g [R, H]; back [R, H + k] is overwritten with (dx, dalpha).
def received_backward(self, rows: Tensor, g: Tensor, k: int, table: Tensor, slots: int, own: List[Tensor], lent: List[Tensor], grads: List[Tensor], lent_grads: List[Tensor], block: int, wide: Tensor, half: Tensor, back: Tensor) -> int:
    hidden = g.size(1)
    order, counts = self.group_received(rows, k, table, slots)
    row = torch.floor_divide(order, k)
    alpha = rows[:, hidden:hidden + k].reshape(-1).index_select(0, order).unsqueeze(1)
    dalpha = torch.empty([order.size(0)], dtype=rows.dtype, device=rows.device)
    back.zero_()
    self.routes_backward(rows[:, :hidden], g, row, alpha, counts, own, lent, grads, lent_grads, 0.0, block, wide, half, back[:, :hidden], dalpha)
    back[:, hidden:].index_put_([row, torch.remainder(order, k)], dalpha)
    return 0

# (dx, dalpha) of rows [R, H + k] added to those of their tokens.
def add_gradients(self, rows: Tensor, tokens: Tensor, dx: Tensor, dcombine: Tensor) -> int:
    hidden = dx.size(1)
    dx.index_add_(0, tokens, rows[:, :hidden])
    dcombine.index_add_(0, tokens, rows[:, hidden:])
    return 0
