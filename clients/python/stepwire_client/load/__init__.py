"""The load behind `stepwire bench`: requests at a fixed concurrency or rate, and what their answers' times say."""
