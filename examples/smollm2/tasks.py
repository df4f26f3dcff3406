"""Name ten further tasks of reasoning-gym with short questions, some of which the model can answer.

None of them was used to choose a setting of job.yaml.
"""

TASKS = (
    "basic_arithmetic?min_terms=2&max_terms=2&max_digits=1&allow_negation=false",
    "products?max_digits=1",
    "gcd?max_value=20",
    "lcm?max_value=10",
    "leg_counting?min_animals=1&max_animals=2&max_instances=3",
    "letter_counting?min_words=1&max_words=3",
    "simple_equations?max_terms=2&max_value=10",
    "decimal_chain_sum?max_terms=2&max_digits=1&max_decimal_places=1",
    "number_sequence?max_complexity=1&min_value=0&max_value=20",
    "count_bits?max_n=15",
)
