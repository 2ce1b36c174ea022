"""What the demo's sentences are made of: templates, and lists of what fills them."""

# A German line, then its English one. {slot} is filled by `corpus.SLOTS["slot"]`; a digit tells two of them apart.
TEMPLATES = """
Der Flug von {city} nach {city2} startet am {date}.
The flight from {city} to {city2} leaves on {date}.
Der Zug nach {city} fährt um {clock} Uhr ab.
The train to {city} departs at {clock}.
Am {date} um {clock} Uhr beginnt die Konferenz in {city}.
The conference in {city} begins on {date} at {clock}.
Die Rechnung über {money} ist am {date} fällig.
The invoice for {money} is due on {date}.
Das Hotel in {city} kostet {money} pro Nacht.
The hotel in {city} costs {money} per night.
{name} hat {money_name} für die Reise nach {territory} ausgegeben.
{name} spent {money_name} on the trip to {territory}.
Der Preis stieg um {percent} auf {money}.
The price rose by {percent} to {money}.
Im Jahr {year} lebten in {territory} {compact} Menschen.
In {year}, {compact} people lived in {territory}.
{name} lernt {language} für eine Reise nach {territory}.
{name} is learning {language} for a trip to {territory}.
Jeden {weekday} um {clock} Uhr trifft sich der Kurs für {language}.
The {language} course meets every {weekday} at {clock}.
Das Museum in {city} ist von {hours} geöffnet.
The museum in {city} is open from {hours}.
Ausstellung in {city}: {span}.
Exhibition in {city}: {span}.
Die Strecke von {city} nach {city2} ist {length} lang.
The route from {city} to {city2} is {length} long.
Das Paket aus {territory} wiegt {mass}.
The package from {territory} weighs {mass}.
Der Wind in {city} erreichte am {weekday} {speed}.
The wind in {city} reached {speed} on {weekday}.
Am {date} wurden in {city} {temperature} gemessen.
On {date}, {temperature} was measured in {city}.
Das Gerät verbraucht {energy} in {cardinal} Tagen.
The device uses {energy} in {cardinal} days.
{cardinal} Gäste kamen aus {territory}.
{cardinal} guests came from {territory}.
Der {ordinal} Besucher kam aus {city}.
The {ordinal} visitor came from {city}.
{name} wurde im {month} {year_words} in {city} geboren.
{name} was born in {city} in {month} {year_words}.
Die Lieferung nach {city} kam {ago} an.
The delivery to {city} arrived {ago}.
{name} war {ago} in {territory} und fliegt {ahead} nach {city}.
{name} was in {territory} {ago} and is flying to {city} {ahead}.
Die Reise führt im {month} durch {territories}.
The trip leads through {territories} in {month}.
Es gibt Filialen in {cities}.
There are branches in {cities}.
Weil der Zug aus {city} erst um {clock} Uhr ankam, hat {name} die Konferenz in {city2} verpasst.
Because the train from {city} did not arrive until {clock}, {name} missed the conference in {city2}.
{name} sagt, dass das Hotel in {city} seit {year} {money} pro Nacht kostet.
{name} says that the hotel in {city} has cost {money} per night since {year}.
Obwohl der Wind in {city} {speed} erreichte, landete der Flug aus {city2} um {clock} Uhr.
Although the wind in {city} reached {speed}, the flight from {city2} landed at {clock}.
{name} hat am {date} in {city} {a_accusative} für {money} gekauft.
{name} bought {a_accusative} in {city} for {money} on {date}.
Am {weekday} um {clock} Uhr holt {name} {the_accusative} aus {city} ab.
{name} picks up {the_accusative} from {city} at {clock} on {weekday}.
Seit {year} gehört {the} {name} aus {territory}.
{the} has belonged to {name} from {territory} since {year}.
Dass {the} {mass} wiegt, wusste {name} nicht.
{name} did not know that {the} weighs {mass}.
Nachdem {name} {duration} gewartet hatte, fuhr {the} nach {city} ab.
After {name} had waited for {duration}, {the} left for {city}.
In {city} wird {ahead} {a} aus {territory} erwartet.
{a} from {territory} is expected in {city} {ahead}.
Im Park von {city}, der {area} groß ist, stand bis {year} {a}.
Until {year}, {a} stood in the park of {city}, which covers {area}.
Die Gäste aus {territory} haben im {month} {volume} Wasser getrunken.
The guests from {territory} drank {volume} of water in {month}.
Wer {language} und {language2} spricht, verdient in {territory} {percent} mehr.
Those who speak {language} and {language2} earn {percent} more in {territory}.
Nicht {name}, sondern {name2} flog {ago} von {city} nach {territory}.
It was not {name} but {name2} who flew from {city} to {territory} {ago}.
"""
NAMES = """Anna David Emma Felix Jonas Laura Lukas Maria Agnes Bruno Carla Dieter Edgar Frieda Gustav Hilda Ingrid
Jakob Konrad Leonie Moritz Norbert Olga Paula Quirin Rosa Stefan Theresa Ursula Viktor Wanda Xaver Yvonne Zacharias"""
# Places and languages by the codes of CLDR (cities by time zones), each list from frequent to rare.
CITIES = """Europe/Rome Europe/Vienna Asia/Tokyo Europe/Prague Europe/Lisbon Europe/Athens Europe/Warsaw Europe/Zurich
Europe/Brussels Europe/Copenhagen Europe/Moscow Europe/Belgrade Europe/Bucharest Africa/Cairo America/Havana
Asia/Singapore Asia/Baghdad Asia/Damascus Asia/Tehran Asia/Taipei Asia/Yerevan Africa/Algiers Africa/Tripoli
Europe/Kiev Europe/Luxembourg Asia/Nicosia Asia/Tbilisi Asia/Hong_Kong Asia/Riyadh Asia/Calcutta Asia/Rangoon
Asia/Saigon America/Mexico_City America/Bogota Africa/Khartoum Africa/Mogadishu Africa/Addis_Ababa Asia/Karachi
Asia/Muscat Asia/Tashkent Asia/Dushanbe Asia/Bishkek Asia/Pyongyang Asia/Katmandu Asia/Vladivostok Asia/Novosibirsk
Asia/Yekaterinburg Asia/Krasnoyarsk Asia/Yakutsk Asia/Chita Europe/Volgograd Europe/Saratov Europe/Astrakhan
Europe/Ulyanovsk Africa/Dar_es_Salaam Africa/Porto-Novo Asia/Qyzylorda Asia/Hovd Asia/Novokuznetsk"""
# No country with an article, in German ("in der Schweiz") or English: a bare "in" before it would be wrong.
TERRITORIES = """DE FR IT ES AT PL JP CN IN BR DK SE NO FI BE GR PT CZ HU IE RO HR SI LT LV EE IS RU CA MX CL PE EG
KE MA ZA NZ AU AR CO CU EC UY PY BO VE CR PA JM HT GT HN NI AL BY BG CY LU MT ME RS AM AZ GE KZ UZ AF PK BD NP LK
TH VN MY SG ID KR KH IL JO SY KW QA OM SA DZ TN LY ET GH NG SN ML CM AO ZM ZW BW NA MZ MG TZ UG RW"""
LANGUAGES = """en fr es it ru pl tr ar zh ja pt nl sv da fi el cs hu ro uk ko hi he fa is et lv lt hr sr sl bg ga
sq hy ka az kk uz mn th vi id sw am bn ta ur ne cy eu ca"""
CURRENCIES = "EUR GBP JPY CHF SEK DKK NOK PLN CZK AUD CAD CNY INR BRL TRY ISK HUF RON ILS KRW MXN NZD SGD THB UAH ZAR"
# German noun, its gender, English noun: things that go somewhere, weigh and cost something, and stand in parks.
VEHICLES = """Bus m bus, Fähre f ferry, Schiff n ship, Wagen m car, Straßenbahn f tram, Boot n boat, Lastwagen m
truck, Kutsche f carriage, Motorrad n motorcycle, Traktor m tractor, Lokomotive f locomotive, Flugzeug n plane,
Hubschrauber m helicopter, Segelboot n sailing boat, Schlitten m sledge, Draisine f handcar, Rettungsboot n
lifeboat, Kran m crane"""
ADJECTIVES = """neu new, alt old, rot red, klein small, groß large, schnell fast, langsam slow, grün green, schwer
heavy, leicht light, laut loud, elegant elegant, rostig rusty, glänzend shiny, seltsam strange, beliebt popular,
gemietet rented, gestohlen stolen, amerikanisch American, unbekannt unknown, verlassen abandoned"""
# Article, ending of the adjective behind it: by German case and article, then gender.
ARTICLES = {
    "the": {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    "the_accusative": {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    "a": {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")},
    "a_accusative": {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")},
}
