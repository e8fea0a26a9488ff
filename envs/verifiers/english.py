"""Classifies English words and counts their syllables, by word lists and rules.

Instructions of IFEval and IFBench need both. No model and no data files are used.
"""

import re


def word_set(text: str) -> frozenset[str]:
    """Returns the set of the words in a text."""
    return frozenset(text.split())


STOP_WORDS = word_set(
    """
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves what which who whom this that these those am is are
    was were be been being have has had having do does did doing a an the and but if or because as until while
    of at by for with about against between into through during before after above below to from up down in out
    on off over under again further then once here there when where why how all any both each few more most
    other some such no nor not only own same so than too very s t can will just don should now d ll m o re ve y
    ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn
    """
)
"""NLTK's stop words that are single words without an apostrophe."""

PRONOUNS = word_set(
    """
    i me we us you he him she her it they them my mine our ours your yours his hers its their theirs myself
    ourselves yourself yourselves himself herself itself themselves this that these those who whom whose which
    what whoever whomever whatever whichever anybody anyone anything everybody everyone everything nobody
    nothing somebody someone something each either neither both all some any none
    """
)

CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
"""The coordinating conjunctions."""

MINOR_WORDS = word_set(
    """
    a an the and but for nor or so yet as at by in of off on per to up via from into like onto over than with
    """
)
"""Words that a title may write in lower case, except at its beginning."""

_AUXILIARIES = word_set("am is are was were be been being do does did done doing have has had having")
_PAST_FORMS = word_set(
    """
    became began bent bitten bled blew blown born bought broke broken brought built came caught chose chosen
    dealt drawn drew driven drove eaten fallen felt fell fought found flew flown forgot forgotten froze frozen
    gave given gone grew grown heard held hidden kept knew known laid led left lent lost made meant met paid
    proven ran rang risen rode rose said sang sat saw seen sent shaken shot shown shrunk slept sold sought spent
    spoke spoken stolen stood stuck struck sung sunk swam swept swum sworn taken taught thought threw thrown
    told took torn understood went woke won wore worn wound written wrote
    """
)
_BASE_FORMS = word_set(
    """
    abandon accept access accompany achieve acknowledge acquire act activate adapt add address adjust admire
    admit adopt advance advise affect afford agree aim align allocate allow alter alternate amplify analyse
    analyze announce answer anticipate apologise apologize appear apply appoint appreciate approach approve
    argue arise arrange arrive ask assemble assert assess assign assist associate assume assure attach attack
    attempt attend attract avoid await awake bake balance ban base bear beat become beg begin behave believe
    belong bend bet bind bite blame blend bless block blow boil book boost borrow bounce bow breathe break brew
    bring brush build burn bury buy calculate call calm cancel capture care carry carve cast catch categorize
    cause celebrate challenge change charge chase check cheer choose chop circulate claim clarify classify clean
    clear click climb close collaborate collect color combine come comfort comment commit communicate compare
    compete compile complain complete comply compose compress compute conceal concentrate conclude conduct
    confess configure confirm confront connect consider consist consolidate construct consult consume contact
    contain contemplate continue contribute control convert convey convince cook cool coordinate cope copy
    correct correspond count cover craft crash crawl create criticise criticize cross crush cry cultivate cut
    dance dare debug decide declare decline decorate decrease dedicate deduce deepen defeat defend define defy
    delay delegate delete deliver demand demonstrate deny depart depend deploy derive describe deserve design
    desire destroy detect determine develop devise devote diagnose dial die differentiate dig diminish direct
    disable disagree disappear discard discover discuss dismiss display distinguish distribute dive divide
    document dodge download drag draft draw dream dress drift drink drive drop dry earn ease eat edit educate
    elaborate elevate eliminate embark embrace emerge emphasise emphasize employ empower enable encounter
    encourage end endure enforce engage enhance enjoy enrich ensure enter entertain establish estimate evaluate
    examine exceed exchange excuse execute exercise exhibit exist expand expect experience experiment explain
    explore export expose express extend extract face facilitate fail fall fasten favor fear feature feed feel
    fetch fight figure fill filter find finish fit fix flip float flow fly focus fold follow forbid forecast
    forget forgive form format formulate foster free freeze fulfil fulfill gain gather gaze generate get give
    glance glow go grab grant grasp greet grind grow guarantee guard guess guide halt handle hang happen harness
    harvest hate have heal hear heat help hesitate hide highlight hire hit hold hope host hug hunt hurry hurt
    identify ignore illuminate illustrate imagine implement imply import impose improve include incorporate
    increase indicate infer influence inform inhale initialize initiate inject innovate input insert insist
    inspect inspire install integrate intend interact interpret introduce invent invest investigate invite
    involve iterate join journey judge jump justify keep kick kill kiss kneel knock know label lack laugh launch
    lay lead lean leap learn leave lend let leverage lie lift light like limit link list listen live load locate
    lock look loop lose love lower maintain make manage map march mark master match matter maximise maximize
    mean measure meditate meet melt memorize mend mention merge mind minimise minimize miss mix model modify
    monitor motivate mount move multiply name narrate navigate need neglect negotiate normalize note notice
    notify obey observe obtain occur offer omit open operate optimise optimize order organise organize outline
    overcome owe own pack paint park participate pass pause pay perceive perform permit persuade pick picture
    place plan plant play plead please point ponder pose position possess post pour practice practise praise
    pray predict prefer prepare present preserve press pretend prevent print prioritise prioritize proceed
    process produce program prohibit promise promote prompt propose protect prove provide publish pull purchase
    pursue push put qualify quantify query question quit raise rank reach react read realise realize recall
    receive recite recognise recognize recommend reconsider record recover reduce refer refine reflect refuse
    regard register regret regulate reinforce reject rejoice relate relax release rely remain remember remind
    remove rename render repair repeat rephrase replace reply report represent request require rescue research
    reserve resist resolve respect respond rest restate restore restrict result resume retain retrieve return
    reveal reverse review revise rewrite ride ring rise roll rotate round run rush sail save say scan scatter
    schedule score search secure see seek seem select sell send separate serve set settle shake shape share
    sharpen shift shine shoot shout show shut sign simplify simulate sing sink sit sketch skip sleep slice slide
    slow smell smile solve sort sound spark speak specify speculate spell spend spin split spread stand stare
    start state stay steal steer step stick stop store strengthen stretch strike strive structure struggle study
    submit substitute subtract succeed suffer suggest suit summarise summarize supply support suppose surround
    survive suspect sustain swallow swap swear sweep swim swing switch take talk target taste teach tear tell
    tend terminate test thank think thrive throw tie touch trace track trade train transform translate transmit
    transport travel treat trust try tune turn twist type uncover understand undertake unleash unlock unravel
    update upgrade upload urge use utilise utilize validate value vary verify view visit visualise visualize
    vote wait wake walk wander want warn wash watch wear weave weigh welcome whisper win wipe wish witness
    wonder work worry wrap write yell yield zoom
    """
)
_FINITE_VERBS = word_set(
    """
    is are was were am has had have can could may might must shall should will would isn't aren't wasn't
    """
)
"""Finite verbs that make the word before them a noun: "work is", "love can"."""

_NEGATION = re.compile(r"n['’]t$")
_GLIDE = re.compile(r"(?<=[aeiou])y(?=[aeiou])")
_VOWELS = re.compile(r"[aeiouy]+")
_TWO_VOWELS = re.compile(
    r"(?<![tscgxq])ia(?!ge|t)|(?<![tscgxqn])(?<!.l)io|(?<![tscgxq])i(?:um|us|en(?:t|ce|cy)?)\b|i(?:at|et(?!f))"
    r"|(?<![rlpg])eo(?!u)|(?:cr|th|id|ar|kor)ea(?![mks]|tur|ch)|(?<!q)ua[lt]|(?<!q)uo(?!us)|oe[tm]|yi|[eou]ing|coop"
)
_SILENT_END = re.compile(
    r"(?<![aeiouytd])(?<!hundr)(?<!kindr)(?<!sacr)ed$|(?<![aeiouyscxzg])(?<![sc]h)es$|(?:[gq]u|(?<![aeiouy]))e$"
)
_SPOKEN_END = re.compile(r"(?<![aeiouylr])les?$|(?<![aeiouy])res?$")
_SILENT_INSIDE = re.compile(
    r"(?<=[aeiouy][bcdfgklmnprstvz])e(?=(?:ment|ful|less|ness|ly|ty|times?|where|thing|what|body|one|way|book|hood)s?$)"
    r"|(?<=ic)a(?=lly$)"
)


def count_syllables(word: str) -> int:
    """Counts the syllables of an English word by its spelling.

    The count is the number of vowel groups, without a silent e, and with pairs such as `ia` and `io` as two. The
    result is 0 for a word with a digit or without a Latin letter. The count is right for most words, not for all,
    since spelling does not determine pronunciation.
    """
    word = "".join(letter for letter in word.lower() if letter.isalnum())
    if any(letter.isdigit() for letter in word) or not re.search("[a-z]", word):
        return 0
    word = _GLIDE.sub("j", word)
    count = len(_VOWELS.findall(word)) + len(_TWO_VOWELS.findall(word)) - len(_SILENT_INSIDE.findall(word))
    if _SILENT_END.search(word) and not _SPOKEN_END.search(word):
        count -= 1
    return max(count, 1)


def starts_with_verb(text: str) -> bool:
    """Whether the first word of a text is a verb form in a list.

    Modal verbs and plain forms in -s are not in the list. A word that may also be a noun does not count before
    a finite verb ("Work is done").
    """
    words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text[:1000].lower())[:2]
    if not words:
        return False
    first = _NEGATION.sub("", words[0]).replace("’", "'").split("'")[0]
    if first in _AUXILIARIES or first in _PAST_FORMS:
        return True
    if words[1:] and words[1].replace("’", "'") in _FINITE_VERBS:
        return False
    return not _BASE_FORMS.isdisjoint(_base_forms(first))


def _base_forms(word: str) -> set[str]:
    """Returns a word and the base forms that its ending -ing or -ed allows."""
    stems = {word}
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            stem = word.removesuffix(ending)
            stems |= {stem, stem + "e"}
            if stem[-1] == stem[-2]:
                stems.add(stem[:-1])
            if stem.endswith("i") and ending == "ed":
                stems.add(stem[:-1] + "y")
            if stem.endswith("y"):
                stems.add(stem[:-1] + "ie")
    return stems
