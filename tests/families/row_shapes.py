"""Shapes for kernels that reduce rows: they fold rows, leave tails, make one kernel or two. With each, the dims that go: begin and end."""

SHAPES = [
    ((1000, 33), 0, 1),
    ((1001, 4), 0, 1),
    ((5, 70, 8), 1, 2),
    ((5, 70, 8), 0, 2),
    ((3, 4, 5, 6), 1, 3),
    ((2, 1, 300, 1, 7), 2, 3),
    ((3000, 128), 0, 1),
    ((17, 4100), 0, 1),
    ((300, 3, 65), 0, 1),
    ((70000, 3), 0, 1),
    ((100003, 1), 0, 1),
    ((1, 50), 0, 1),
    ((4, 1, 50), 1, 2),
    ((40, 9), 1, 2),
    ((3, 5), 0, 1),
]
