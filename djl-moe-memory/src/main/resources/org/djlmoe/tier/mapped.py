def map(self, path: str, elements: int) -> Tensor:
    return torch.from_file(path, True, elements, dtype=6)
