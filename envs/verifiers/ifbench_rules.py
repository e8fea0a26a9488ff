"""Table of the 58 instructions of IFBench (Pyatkin et al. 2025), with rules and arguments.

The rules are those of the published evaluation with its later corrections, without its errors. docs/rewards.md
lists the verdicts that differ.
"""

from collections.abc import Mapping

from envs.verifiers import ifbench_counts as counts
from envs.verifiers import ifbench_custom as custom
from envs.verifiers import ifbench_formats as formats
from envs.verifiers import ifbench_words as words
from envs.verifiers.ifeval_rules import InstructionRule

_INSTRUCTIONS: Mapping[str, tuple[InstructionRule, *tuple[str, ...]]] = {
    "count:word_count_range": (counts.word_count_range, "min_words", "max_words"),
    "count:unique_word_count": (counts.unique_word_count, "N"),
    "count:conjunctions": (counts.conjunctions, "small_n"),
    "count:person_names": (counts.person_names, "N"),
    "count:numbers": (counts.numbers, "N"),
    "count:punctuation": (counts.punctuation_marks,),
    "count:words_japanese": (counts.words_japanese, "N"),
    "count:pronouns": (counts.pronouns, "N"),
    "count:keywords_multiple": (counts.keywords_multiple, *counts.KEYWORD_COUNTS),
    "ratio:stop_words": (counts.stop_words, "percentage"),
    "ratio:sentence_type": (counts.sentence_type,),
    "ratio:sentence_balance": (counts.sentence_balance,),
    "ratio:sentence_words": (counts.sentence_words,),
    "ratio:overlap": (counts.overlap, "reference_text", "percentage"),
    "words:alphabet": (words.alphabet,),
    "words:vowel": (words.vowel,),
    "words:consonants": (words.consonants,),
    "words:palindrome": (words.palindrome,),
    "words:prime_lengths": (words.prime_lengths,),
    "words:start_verb": (words.start_verb,),
    "words:repeats": (words.repeats, "small_n"),
    "words:odd_even_syllables": (words.odd_even_syllables,),
    "words:last_first": (words.last_first,),
    "words:paragraph_last_first": (words.paragraph_last_first,),
    "words:no_consecutive": (words.no_consecutive,),
    "words:keywords_specific_position": (words.keywords_specific_position, "keyword", "n", "m"),
    "words:words_position": (words.words_position, "keyword"),
    "sentence:keyword": (words.sentence_keyword, "word", "N"),
    "sentence:alliteration_increment": (words.alliteration_increment,),
    "sentence:increment": (words.increment, "small_n"),
    "format:parentheses": (formats.parentheses,),
    "format:quotes": (formats.quotes,),
    "format:options": (formats.options, "options"),
    "format:newline": (formats.newline,),
    "format:emoji": (formats.emoji,),
    "format:line_indent": (formats.line_indent,),
    "format:quote_unquote": (formats.quote_unquote,),
    "format:list": (formats.bullet_list, "sep"),
    "format:thesis": (formats.thesis,),
    "format:sub-bullets": (formats.sub_bullets,),
    "format:no_bullets_bullets": (formats.no_bullets_bullets,),
    "format:title_case": (formats.title_case,),
    "format:output_template": (formats.output_template,),
    "format:no_whitespace": (formats.no_whitespace,),
    "repeat:repeat_change": (formats.repeat_change, "prompt_to_repeat"),
    "repeat:repeat_simple": (formats.repeat_simple,),
    "repeat:repeat_span": (formats.repeat_span, "prompt_to_repeat", "n_start", "n_end"),
    "custom:multiples": (custom.multiples,),
    "custom:mcq_count_length": (custom.mcq_count_length,),
    "custom:reverse_newline": (custom.reverse_newline,),
    "custom:word_reverse": (custom.word_reverse,),
    "custom:character_reverse": (custom.character_reverse,),
    "custom:sentence_alphabet": (custom.sentence_alphabet,),
    "custom:european_capitals_sort": (custom.european_capitals_sort,),
    "custom:csv_city": (custom.csv_city,),
    "custom:csv_special_character": (custom.csv_special_character,),
    "custom:csv_quotes": (custom.csv_quotes,),
    "custom:date_format_list": (custom.date_format_list,),
}
"""Rule of every instruction by id, followed by the arguments that the rule reads."""

RULES: Mapping[str, InstructionRule] = {name: rule for name, (rule, *_) in _INSTRUCTIONS.items()}
"""Rule of every instruction of the data set by id."""
NEEDED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(needed) for name, (_, *needed) in _INSTRUCTIONS.items() if needed
}
"""Arguments that every rule reads; a rule without arguments is not listed."""
SENTENCE_RULES = frozenset(
    (
        *("count:pronouns", "ratio:sentence_type", "ratio:sentence_balance", "ratio:sentence_words"),
        *("ratio:overlap", "words:last_first", "words:keywords_specific_position", "words:words_position"),
        *("sentence:keyword", "sentence:alliteration_increment", "sentence:increment", "format:emoji"),
        *("format:no_bullets_bullets", "custom:sentence_alphabet"),
    )
)
"""Instructions that need NLTK's sentence data."""
