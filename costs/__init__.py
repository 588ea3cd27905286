"""The one estimator of time, bytes and operations: counted on shapes, timed on this machine, or read off data sheets.

`counting` counts the operations and bytes of a step on tensors without contents, `timing` times pieces of work in
turns, `round_timing` times what a decoding round is made of, `machine_speed` knows how fast machines are, and
`training` sums up what a training will need. What the decoder has to know before it allocates stands below, in
`decode.memory`.
"""
