"""What is young, rare or for authors: it imports the kernel, and nothing in the kernel imports it.

docs/lab.md says what each part is for, what was measured, and what it must show to move into the kernel.
"""
