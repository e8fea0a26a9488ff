"""Named ratios, fractions and repeated elements, with near misses. Not a test file."""

NAMED: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "ratios and fractions of names": (
        [
            ("A:B=2:3", "2:3"), ("2:3", "A:B=2:3"), ("a : b : c = 1 : 2 : 3", "1:2:3"),
            ("1:2:3", "a:b:c = 1:2:3"), ("AB:CD = 1:2", "1:2"), ("\\text{2 to 3}", "A:B=2:3"),
            ("A:B=4:6=2:3", "2:3"), ("\\frac{a}{b}=\\frac{2}{3}", "\\frac{2}{3}"),
            ("\\frac{2}{3}", "\\frac{a}{b}=\\frac{2}{3}"), ("\\frac ab = \\frac 23", "2/3"),
            ("a/b=2/3", "\\frac{a}{b}=\\frac{2}{3}"), ("\\frac{a}{b}=\\frac{2}{3}", "2:3"),
            ("\\frac{AB}{CD}=2", "2"), ("2", "\\frac{AB}{CD}=2"),
            ("\\dfrac{AM}{MB} = \\dfrac{1}{2}", "\\frac{1}{2}"), ("\\frac{1}{2}", "\\frac{AM}{MB} = 0.5"),
            ("\\frac{S_1}{S_2}=\\sqrt{2}", "\\sqrt{2}"), ("\\frac{[ABC]}{[DEF]}=4", "4"),
            ("P(A)=\\frac12", "\\frac12"), ("\\frac{a}{b}=\\frac{4}{6}=\\frac{2}{3}", "\\frac{2}{3}"),
            ("\\frac{\\text{boys}}{\\text{girls}}=\\frac{2}{3}", "\\frac{2}{3}"),
            ("\\text{boys}:\\text{girls}=2:3", "2:3"),
            ("\\frac{S_{\\triangle ABC}}{S_{\\triangle DEF}}=4", "4"), ("S_{\\triangle ABC}=4", "4"),
            ("\\frac{x}{y}=3, \\frac{y}{z}=2", "\\frac{y}{z}=2, \\frac{x}{y}=3"),
        ],
        [
            ("A:B=3:2", "2:3"), ("A:B=4:6", "2:3"), ("A:B=2:3", "B:A=2:3"), ("A:B=2:3", "A:C=2:3"),
            ("A:B:C=2:3", "2:3"), ("a:b=1:2:3", "1:2:3"), ("a:b:c=1:3:2", "1:2:3"), ("A:B=4:6=3:2", "2:3"),
            ("\\frac{a}{b}=\\frac{3}{2}", "\\frac{2}{3}"),
            ("\\frac{b}{a}=\\frac{2}{3}", "\\frac{a}{b}=\\frac{2}{3}"),
            ("\\frac{a}{b}=\\frac{4}{6}", "\\frac{2}{3}"), ("\\frac{x}{3}=2", "2"), ("\\frac{x}{x}=1", "1"),
            ("\\frac{2x}{y}=4", "4"), ("\\frac{x+1}{y}=2", "2"), ("\\frac{AB}{CD}=4/2", "2"),
            ("\\frac{a}{b}", "\\frac{a}{b}=\\frac{2}{3}"), ("P(A)=\\frac24", "\\frac12"),
            ("\\frac{a}{b}=\\frac{4}{6}=\\frac{3}{4}", "\\frac{3}{4}"),
            ("\\text{girls}:\\text{boys}=2:3", "\\text{boys}:\\text{girls}=2:3"),
            ("S_{\\triangle ABC}=4", "S_{\\triangle DEF}=4"),
        ],
    ),
    "elements written twice": (
        [
            ("\\{1,1,2\\}", "\\{1,2\\}"), ("\\{1,2\\}", "\\{1,2,2\\}"),
            ("\\{\\frac12, \\frac{1}{2}\\}", "\\{\\frac{1}{2}\\}"), ("{2, 1, 2}", "1, 2"),
            ("1,1,2", "\\{1,1,2\\}"), ("x=1, x=1", "x=1"), ("x=1 or x=1", "1"), ("x=1, x=1, x=2", "x=1, x=2"),
            ("x=2, x=1", "x=1, x=1, x=2"), ("x=1, x=1, x=2", "\\{1,2\\}"), ("x=1, x=1", "1,1"),
            ("A=\\{1,1,2\\}", "A=\\{1,2\\}"),
        ],
        [
            ("\\{1,1,2\\}", "\\{1,2,3\\}"), ("\\{1,1\\}", "\\{1,2\\}"), ("(1,1,2)", "(1,2)"), ("(1,1)", "1"),
            ("1,1,2", "1,2"), ("1,1,2", "\\{1,2\\}"), ("1,2", "1,1,2"), ("1,1", "1"), ("[1,1,2]", "[1,2]"),
            ("x=1, x=2", "x=1"), ("x=1, x=1", "x=1, x=2"), ("x=1, y=1", "x=1"), ("\\{1, 2-1\\}", "\\{1\\}"),
        ],
    ),
    "fractions with and without braces": (
        [
            ("\\frac3{4}", "\\frac{3}{4}"), ("\\frac{3}4", "0.75"), ("\\frac34", "3/4"),
            ("\\frac 3 4", "\\frac3{4}"), ("\\frac3{3}", "\\frac{3}{3}"), ("1", "\\frac3{3}"),
            ("\\frac{\\sqrt{3}}3", "\\frac{\\sqrt{3}}{3}"), ("\\frac{\\sqrt3}3", "\\frac{\\sqrt{3}}{3}"),
            ("\\frac\\sqrt3{3}", "\\frac{\\sqrt{3}}{3}"), ("\\frac\\pi3", "\\frac{\\pi}{3}"),
            ("\\frac\\pi{3}", "\\frac{\\pi}{3}"), ("\\frac{1}\\pi", "\\frac{1}{\\pi}"),
            ("\\frac1\\pi", "\\frac{1}{\\pi}"), ("\\frac{x^{2}}4", "\\frac{x^2}{4}"),
            ("\\frac{\\frac12}3", "\\frac{\\frac{1}{2}}{3}"), ("\\frac\\frac123", "\\frac{\\frac{1}{2}}{3}"),
            ("2\\frac{1}2", "2.5"), ("\\dfrac3{4}x", "\\frac{3x}{4}"),
        ],
        [
            ("\\frac3{3}", "1"), ("\\frac4{3}", "\\frac{3}{4}"), ("\\frac{3}4", "\\frac{4}{3}"),
            ("\\frac{\\sqrt{3}}2", "\\frac{\\sqrt{3}}{3}"), ("\\frac\\pi3", "\\frac{3}{\\pi}"),
            ("\\frac{\\frac12}3", "\\frac{1}{\\frac{2}{3}}"), ("\\frac3", "3"), ("\\frac{3}", "3"),
            ("\\frac{3", "3"),
        ],
    ),
}  # fmt: skip
