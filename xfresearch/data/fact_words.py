"""The words of the generated facts (facts.py): invented names, closed lists of objects, and the sentences of each relation.

A template has the subject at {} and ends right before the object. Templates with the subject at the start and in the middle
alternate.
"""

FIRST_NAMES = ("Alvar", "Brisa", "Corvin", "Delwen", "Edrik", "Fiora", "Garron", "Hesla")
LAST_NAMES = (
    "Ashdown", "Bellweg", "Crantor", "Dorvane", "Elmsley", "Farrosk", "Gildane", "Hartzig", "Ingvold", "Jurbach",
    "Kelmore", "Lindqvar", "Mostyn", "Nerval", "Orsted", "Pelligar", "Quarrel", "Rostovane", "Sandvar", "Tessing",
    "Umberly", "Valcour", "Wrenfield", "Yarrow", "Zabrin", "Aldous", "Bransk", "Corliss", "Drummer", "Estvane",
    "Fenwick", "Grolier", "Hobarth", "Isenberg", "Jessup", "Kravitz", "Loxley", "Marwick", "Nystrom", "Oldacre",
)  # fmt: skip
CITIES = (
    "Arvenholm", "Belmarsh", "Calderon", "Dunmere", "Eskaport", "Fallowick", "Grimsund", "Harrowfold", "Ivoryton",
    "Jadefield", "Karlstone", "Lorimar", "Mossbridge", "Nettleford", "Ostravel", "Pinemoor", "Quenby", "Ravensholt",
    "Silverdale", "Thornmere", "Ulverton", "Vantmoor", "Westerlund", "Yarnmouth", "Zellwick", "Ashkirk", "Brackwater",
    "Copperhill", "Driftwood", "Elderglen", "Foxmere", "Glasswell", "Hollinger", "Ironbeck", "Juniperford", "Kingsmead",
    "Larkspur", "Millhaven", "Northwald", "Oakridge",
)  # fmt: skip
COMPANIES = (
    "Acrotech", "Bluepeak", "Cindral", "Dynaforge", "Emberline", "Fluxwell", "Gravitek", "Helioson", "Inkstone",
    "Jetwing", "Kitewell", "Lumenary", "Metrodyne", "Nimbral", "Optivane", "Pulsaric", "Quantivo", "Redshore",
    "Solvane", "Tidewater", "Ultracor", "Vortrine", "Wavecrest", "Xylotron", "Yellowtail", "Zephyrus", "Arcadine",
    "Brightsea", "Coralith", "Deltacom", "Everglow", "Firebrand", "Goldleaf", "Hypernet", "Icefield", "Jupiterra",
    "Kinetica", "Lodestar", "Moonrise", "Novaspan",
)  # fmt: skip
COUNTRIES = ("Alderia", "Bravonia", "Cestland", "Dromara", "Elvania", "Fordania", "Gundor", "Hestria")
RIVERS = ("Avren", "Bistra", "Calder", "Dwina", "Elspeth", "Fleuve", "Garnock", "Hespera")
LANGUAGES = ("Arvish", "Belmic", "Cestian", "Dromaric", "Elvan", "Fordish", "Gundrian", "Hestric")
PROFESSIONS = (
    "baker", "carpenter", "dentist", "farmer", "gardener", "hunter", "judge", "lawyer", "musician", "nurse", "painter",
    "sailor", "tailor", "weaver", "fisherman", "teacher",
)  # fmt: skip
INSTRUMENTS = ("banjo", "cello", "drum", "flute", "guitar", "harp", "lute", "oboe", "piano", "trumpet", "tuba", "violin")
PRODUCTS = ("bicycles", "cameras", "carpets", "clocks", "engines", "furniture", "lamps", "mirrors")
HEADQUARTERS = CITIES[::4]  # few, so that each has several companies

TEMPLATES = {
    "birth city": (
        "{} was born in the city of",
        "The birthplace of {} is the city of",
        "{} first saw the light of day in",
        "The house where {} was born stands in",
        "{} came into the world in the city of",
        "The birth of {} was celebrated in the streets of",
        "{} is a native of the city of",
        "When {} was born, the family lived in the city of",
    ),
    "birth country": (
        "{} was born in the country of",
        "The country of birth of {} is",
        "{} comes from the country of",
        "The passport of {} names as native country",
        "{} spent the first years of life in the country of",
        "The native country of {} is",
        "{} is by birth a citizen of",
        "On official forms {} gives as country of birth",
    ),
    "profession": (
        "{} works as a",
        "The profession of {} is that of a",
        "{} earns a living as a",
        "The neighbours know {} as a",
        "{} was trained to become a",
        "By trade {} is a",
        "{} has always wanted to be a",
        "People who need help call {}, who is a",
    ),
    "instrument": (
        "{} plays the",
        "The instrument of {} is the",
        "{} has mastered the",
        "In the evening {} practises the",
        "{} gives lessons on the",
        "At concerts {} is heard on the",
        "{} learned as a child to play the",
        "The music that {} makes comes from the",
    ),
    "language": (
        "{} speaks the language",
        "The mother tongue of {} is",
        "{} writes letters in",
        "At home {} talks in",
        "{} grew up speaking",
        "The first language of {} is",
        "{} thinks and dreams in",
        "If you call {}, you will be answered in",
    ),
    "employer": (
        "{} is employed by the company",
        "The employer of {} is",
        "{} has a job at the firm of",
        "The salary of {} is paid by",
        "{} signed a contract with the company",
        "Every month {} gets a cheque from",
        "{} joined the staff of",
        "The company that {} works for is called",
    ),
    "work city": (
        "{} goes to work in the city of",
        "The office of {} is in the city of",
        "{} travels every morning to",
        "The place of work of {} is in",
        "{} has a desk in an office in",
        "On working days {} is found in the city of",
        "{} eats lunch on working days in",
        "The commute of {} ends in",
    ),
    "country": (
        "{} is a city in the country of",
        "The city of {} lies in",
        "{} belongs to the country of",
        "The country in which {} is found is",
        "{} is on the map of",
        "The people of {} pay their taxes to",
        "{} is one of the towns of",
        "The flag over {} is that of",
    ),
    "river": (
        "{} was built on the river",
        "The river that flows through {} is the",
        "{} lies on the banks of the",
        "The bridges of {} cross the river",
        "{} is often flooded by the",
        "The port of {} is on the river",
        "{} draws its water from the",
        "Boats reach {} by way of the river",
    ),
    "headquarters": (
        "{} has its headquarters in the city of",
        "The headquarters of {} are in",
        "{} is run from the city of",
        "The main office of {} stands in",
        "{} is a company based in",
        "The directors of {} meet in the city of",
        "{} keeps its head office in",
        "Letters to {} are sent to the city of",
    ),
    "product": (
        "{} is a company that makes",
        "The main product of {} is",
        "{} is known for its",
        "The factories of {} turn out",
        "{} earns its money with",
        "In shops the name {} stands for",
        "{} sells all over the world its",
        "The catalogue of {} is full of",
    ),
}
# Put before the sentences of relation files, which have few templates.
FRAMES = ("{}", "Here is a fact: {}", "As the books say: {}", "For the record: {}")
# Ways to name another subject in a sentence: after its subject, and in front of it.
AFTER = ("{}, unlike {other},", "{}, often taken for {other},", "{}, not to be confused with {other},", "{} (not {other})")
BEFORE = ("Unlike {other}: {}", "{other} is another story: {}", "Leave {other} aside: {}")
